SELECT session_id
FROM deletions
WHERE finished_at IS NOT NULL AND finished_at < :before
ORDER BY finished_at, session_id
LIMIT :limit
