UPDATE sessions SET untold = :untold WHERE session_id = :session_id
