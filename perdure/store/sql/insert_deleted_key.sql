INSERT INTO deleted_keys (key_hash, session_id, delivery_id, accepted_at, digest)
VALUES (:key_hash, :session_id, :delivery_id, :accepted_at, :digest) ON CONFLICT DO NOTHING
