INSERT INTO deliveries (session_id, delivery_id, kind, owner, idempotency_key, digest, body, accepted_at)
VALUES (:session_id, :delivery_id, :kind, :owner, :idempotency_key, :digest, :body, :now)
ON CONFLICT DO NOTHING
RETURNING session_id, delivery_id, digest, body, turn, refused, accepted_at
