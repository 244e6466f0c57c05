UPDATE sessions SET expired_records = 1 WHERE session_id = :session_id
