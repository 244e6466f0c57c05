SELECT expired_deltas AS deltas, expired_messages AS messages, expired_records AS records
FROM sessions
WHERE session_id = :session_id
