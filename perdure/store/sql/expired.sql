SELECT expired_deltas AS deltas, expired_messages AS messages
FROM sessions
WHERE session_id = :session_id
