-- Without the bodies, which may be large: a signal carries only the reference of a delivery.
SELECT
    session_id, delivery_id, kind, digest, NULL AS body, turn, refused, accepted_at, ref, started_at, settled_at, outcome,
    error, edits, lane, mode, position, answered_by_turn
FROM deliveries
WHERE session_id = :session_id
    AND turn IS NULL
    AND refused IS NULL
    AND (accepted_at, delivery_id) > (:after_at, :after_id)
ORDER BY accepted_at, delivery_id
LIMIT :limit
