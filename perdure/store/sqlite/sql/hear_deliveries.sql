UPDATE deliveries
SET turn = :turn,
    body = NULL
WHERE session_id = :session_id
    AND delivery_id IN (SELECT value FROM json_each(:delivery_ids))
    AND refused IS NULL
    AND (turn IS NULL OR turn = :turn)
RETURNING delivery_id
