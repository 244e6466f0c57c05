-- What is left of deleted sessions of this name. The newest number is kept, so that it does not come again.
DELETE FROM instances
WHERE token_hash = :token_hash
    AND session_id IS NULL
    AND number < (SELECT MAX(others.number) FROM instances AS others WHERE others.token_hash = :token_hash)
