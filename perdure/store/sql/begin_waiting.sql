UPDATE sessions SET status = 'waiting', cancel_turn = NULL WHERE session_id = :session_id AND status = 'starting'
