SELECT session_id, delivery_id, digest, body, turn, refused, accepted_at
FROM deliveries
WHERE owner = :owner AND idempotency_key = :idempotency_key
