-- The next number of the name, unless it has the session already.
INSERT INTO instances (token_hash, number, session_id)
SELECT :token_hash, COALESCE(MAX(number) + 1, 0), :session_id
FROM instances
WHERE token_hash = :token_hash
HAVING NOT EXISTS (SELECT 1 FROM instances WHERE session_id = :session_id)
ON CONFLICT DO NOTHING
