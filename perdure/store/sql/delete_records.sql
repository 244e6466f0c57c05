DELETE FROM records WHERE session_id = :session_id
