SELECT number, session_id FROM instances WHERE token_hash = :token_hash ORDER BY number DESC LIMIT 1
