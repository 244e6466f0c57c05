UPDATE remote_calls
SET state = :state
WHERE session_id = :session_id AND action = :action AND ended_at IS NULL
