SELECT session_id FROM routes WHERE token_hash = :token_hash
