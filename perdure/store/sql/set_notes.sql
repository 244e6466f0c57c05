UPDATE sessions SET notes = :notes WHERE session_id = :session_id
