UPDATE sessions SET cancel_turn = :turn, cancel_meant = :meant WHERE session_id = :session_id
