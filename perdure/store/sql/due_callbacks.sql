SELECT session_id
FROM callbacks
WHERE due_at IS NOT NULL AND due_at <= :now
ORDER BY due_at, session_id
LIMIT :limit
