UPDATE deliveries
SET turn = :turn,
    body = NULL
WHERE session_id = :session_id
    AND delivery_id = ANY(CAST(:delivery_ids AS text[]))
    AND refused IS NULL
    AND (turn IS NULL OR turn = :turn)
RETURNING delivery_id
