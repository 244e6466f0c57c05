UPDATE sessions SET untold = untold + 1 WHERE session_id = :session_id
