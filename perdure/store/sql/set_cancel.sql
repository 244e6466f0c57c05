UPDATE sessions SET cancel_turn = :turn WHERE session_id = :session_id
