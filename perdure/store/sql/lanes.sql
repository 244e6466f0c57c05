-- A session has few children and lanes, so this needs no index of its own.
SELECT session_id, lane, status, closed_at, next_index
FROM sessions
WHERE parent_id = :session_id AND lane <> 'main'
ORDER BY created_at, session_id
LIMIT :limit
