DELETE FROM inputs WHERE session_id = :session_id
