UPDATE sessions SET expired_records = :state WHERE session_id = :session_id
