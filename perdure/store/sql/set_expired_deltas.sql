UPDATE sessions SET expired_deltas = :turns WHERE session_id = :session_id
