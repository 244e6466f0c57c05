SELECT session_id, action, state, begun_at, ended_at
FROM remote_calls
WHERE token_hash = :token_hash
