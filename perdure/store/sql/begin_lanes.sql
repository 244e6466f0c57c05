UPDATE sessions SET lane = 'main' WHERE session_id = :session_id AND lane IS NULL
