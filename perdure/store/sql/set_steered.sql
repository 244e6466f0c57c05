UPDATE sessions SET steered = :steered WHERE session_id = :session_id
