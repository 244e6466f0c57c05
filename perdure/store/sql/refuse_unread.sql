UPDATE deliveries
SET refused = :code,
    body = NULL
WHERE session_id = :session_id AND turn IS NULL AND refused IS NULL
RETURNING delivery_id
