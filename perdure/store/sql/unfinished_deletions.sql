SELECT session_id
FROM deletions
WHERE finished_at IS NULL
ORDER BY requested_at, session_id
LIMIT :limit
