DELETE FROM events WHERE session_id = :session_id
