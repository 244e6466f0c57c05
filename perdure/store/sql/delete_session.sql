DELETE FROM sessions WHERE session_id = :session_id
