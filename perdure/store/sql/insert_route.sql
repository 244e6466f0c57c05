INSERT INTO routes (token_hash, session_id)
VALUES (:token_hash, :session_id)
ON CONFLICT DO NOTHING
RETURNING token_hash
