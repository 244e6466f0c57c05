DELETE FROM inputs
WHERE session_id = :session_id
    AND request_id IN (SELECT request_id FROM inputs WHERE session_id = :session_id LIMIT :limit)
RETURNING request_id
