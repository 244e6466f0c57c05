DELETE FROM slots WHERE session_id = :session_id AND name = :name
