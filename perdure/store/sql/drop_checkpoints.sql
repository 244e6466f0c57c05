-- Those without a name, except for the newest.
DELETE FROM checkpoints
WHERE session_id = :session_id
    AND name IS NULL
    AND number NOT IN (
        SELECT number FROM checkpoints WHERE session_id = :session_id AND name IS NULL ORDER BY number DESC LIMIT :kept
    )
