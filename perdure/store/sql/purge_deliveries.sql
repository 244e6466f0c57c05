DELETE FROM deliveries
WHERE session_id = :session_id
    AND delivery_id IN (SELECT delivery_id FROM deliveries WHERE session_id = :session_id LIMIT :limit)
RETURNING owner, idempotency_key, delivery_id, accepted_at, digest
