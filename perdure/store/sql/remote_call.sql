SELECT session_id, action, state, begun_at, ended_at
FROM remote_calls
WHERE session_id = :session_id AND action = :action
