SELECT session_id FROM deleted_keys WHERE key_hash = :key_hash
