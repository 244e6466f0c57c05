DELETE FROM records
WHERE session_id = :session_id
    AND (turn, step, slot) IN (SELECT turn, step, slot FROM records WHERE session_id = :session_id LIMIT :limit)
RETURNING turn
