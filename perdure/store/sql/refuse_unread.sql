UPDATE deliveries
SET refused = :code,
    outcome = 'refused',
    settled_at = :now,
    body = NULL
WHERE session_id = :session_id AND turn IS NULL AND refused IS NULL
RETURNING delivery_id
