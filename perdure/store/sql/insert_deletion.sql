INSERT INTO deletions (session_id, owner_hash, requested_at, counts)
VALUES (:session_id, :owner_hash, :now, '{}')
ON CONFLICT DO NOTHING
