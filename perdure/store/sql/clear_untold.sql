UPDATE sessions SET untold = 0 WHERE session_id = :session_id AND untold = :marks
