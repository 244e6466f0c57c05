SELECT session_id, delivery_id, accepted_at, digest FROM deleted_keys WHERE key_hash = :key_hash
