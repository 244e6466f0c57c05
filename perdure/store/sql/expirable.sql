SELECT session_id, created_at, title, turns, closed_at, forked_from, expired_deltas, expired_messages, expired_records
FROM sessions
WHERE created_at < :before AND (created_at, session_id) > (:created_at, :session_id)
ORDER BY created_at, session_id
LIMIT :limit
