SELECT session_id, delivery_id, kind, digest, body, turn, refused, accepted_at, ref
FROM deliveries
WHERE owner = :owner AND idempotency_key = :idempotency_key
