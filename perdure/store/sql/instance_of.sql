SELECT token_hash, number FROM instances WHERE session_id = :session_id
