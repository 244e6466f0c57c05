SELECT token_hash FROM routes WHERE session_id = :session_id
