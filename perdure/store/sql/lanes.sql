-- A session has few children and lanes, so this needs no index of its own. However many have ended, no living one is
-- missing.
SELECT session_id, lane, status, closed_at, next_index, created_at
FROM sessions
WHERE parent_id = :session_id AND lane <> 'main'
ORDER BY CASE WHEN closed_at IS NULL THEN 0 ELSE 1 END, created_at DESC, session_id DESC
LIMIT :limit
