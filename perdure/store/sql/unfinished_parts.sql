SELECT session_id
FROM deletions
WHERE part_of = :session_id AND finished_at IS NULL
ORDER BY session_id
LIMIT :limit
