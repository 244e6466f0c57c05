INSERT INTO deleted_keys (key_hash, session_id) VALUES (:key_hash, :session_id) ON CONFLICT DO NOTHING
