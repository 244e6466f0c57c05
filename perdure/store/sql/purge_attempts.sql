DELETE FROM attempts
WHERE session_id = :session_id
    AND (turn, step, scope, number) IN (
        SELECT turn, step, scope, number FROM attempts WHERE session_id = :session_id LIMIT :limit
    )
RETURNING turn
