UPDATE sessions SET left_out = :left_out WHERE session_id = :session_id
