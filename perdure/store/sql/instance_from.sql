SELECT number, session_id FROM instances WHERE token_hash = :token_hash AND number >= :number ORDER BY number LIMIT 1
