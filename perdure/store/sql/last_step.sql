SELECT MAX(step) AS step FROM records WHERE session_id = :session_id AND turn = :turn
