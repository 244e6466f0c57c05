INSERT INTO deliveries (session_id, delivery_id, kind, owner, idempotency_key, digest, body, ref, accepted_at, lane, mode)
VALUES (:session_id, :delivery_id, :kind, :owner, :idempotency_key, :digest, :body, :ref, :now, :lane, :mode)
ON CONFLICT DO NOTHING
RETURNING
    session_id, delivery_id, kind, digest, body, turn, refused, accepted_at, ref, started_at, settled_at, outcome,
    error, edits, lane, mode, position, answered_by_turn
