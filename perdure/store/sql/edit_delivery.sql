UPDATE deliveries
SET body = :body,
    ref = :ref,
    mode = :mode,
    position = :position,
    edits = edits + 1
WHERE session_id = :session_id
    AND delivery_id = :delivery_id
    AND turn IS NULL
    AND refused IS NULL
    AND edits = :edits
RETURNING
    session_id, delivery_id, kind, digest, body, turn, refused, accepted_at, ref, started_at, settled_at, outcome,
    error, edits, lane, mode, position, answered_by_turn
