DELETE FROM checkpoints
WHERE session_id = :session_id
    AND number IN (SELECT number FROM checkpoints WHERE session_id = :session_id LIMIT :limit)
RETURNING number
