UPDATE remote_calls
SET ended_at = :now,
    token_hash = NULL,
    state = :state
WHERE session_id = :session_id AND action = :action AND ended_at IS NULL
RETURNING action
