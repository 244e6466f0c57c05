UPDATE deliveries
SET refused = :code,
    outcome = 'superseded',
    settled_at = :now,
    body = NULL
WHERE session_id = :session_id
    AND lane = :lane
    AND kind = 'message'
    AND turn IS NULL
    AND refused IS NULL
    AND delivery_id <> :but
RETURNING delivery_id, accepted_at
