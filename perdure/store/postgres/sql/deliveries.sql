SELECT
    session_id, delivery_id, kind, digest, body, turn, refused, accepted_at, ref, started_at, settled_at, outcome,
    error, edits, lane, mode, position, answered_by_turn
FROM deliveries
WHERE session_id = :session_id AND delivery_id = ANY(CAST(:delivery_ids AS text[]))
