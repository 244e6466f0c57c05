SELECT tries, settled, ended_at FROM callbacks WHERE session_id = :session_id
