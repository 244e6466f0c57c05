INSERT INTO remote_calls (session_id, action, token_hash, state, begun_at)
VALUES (:session_id, :action, :token_hash, :state, :now)
ON CONFLICT DO NOTHING
