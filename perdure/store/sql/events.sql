SELECT *
FROM events
WHERE session_id = :session_id AND idx >= :start
ORDER BY idx
LIMIT :limit
