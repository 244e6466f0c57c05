INSERT INTO deletions (session_id, owner_hash, requested_at, counts, part_of)
VALUES (:session_id, :owner_hash, :now, '{}', :part_of)
ON CONFLICT DO NOTHING
