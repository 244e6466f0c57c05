SELECT delivery_id
FROM deliveries
WHERE session_id = :session_id
    AND kind = 'message'
    AND mode = 'steer'
    AND turn IS NULL
    AND refused IS NULL
LIMIT 1
