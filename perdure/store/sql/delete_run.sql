DELETE FROM runs WHERE session_id = :session_id
