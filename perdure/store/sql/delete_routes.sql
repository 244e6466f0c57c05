DELETE FROM routes WHERE session_id = :session_id
