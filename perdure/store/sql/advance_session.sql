UPDATE sessions
SET next_index = :next_index,
    updated_at = :now
WHERE session_id = :session_id
