UPDATE sessions SET expired_messages = :turns WHERE session_id = :session_id
