-- What waits in a lane, in the order in which it will be read, without the bodies, which may be large.
SELECT
    session_id, delivery_id, kind, digest, NULL AS body, turn, refused, accepted_at, ref, started_at, settled_at, outcome,
    error, edits, lane, mode, position, answered_by_turn
FROM deliveries
WHERE session_id = :session_id
    AND lane = :lane
    AND turn IS NULL
    AND refused IS NULL
ORDER BY COALESCE(position, accepted_at), delivery_id
