SELECT request_id FROM inputs WHERE session_id = :session_id AND status = 'open' LIMIT 1
