DELETE FROM slot_steps
WHERE session_id = :session_id
    AND (name, turn, step) IN (SELECT name, turn, step FROM slot_steps WHERE session_id = :session_id LIMIT :limit)
RETURNING name
