SELECT
    session_id, delivery_id, kind, digest, body, turn, refused, accepted_at, ref, started_at, settled_at, outcome,
    error, edits, lane, mode, position, answered_by_turn
FROM deliveries
WHERE delivery_id = :delivery_id
LIMIT 10
