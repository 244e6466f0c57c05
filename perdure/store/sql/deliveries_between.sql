-- Those that were accepted, or read by a turn, in this time.
WITH found AS (
    SELECT * FROM (
        SELECT delivery_id
        FROM deliveries
        WHERE session_id = :session_id AND accepted_at >= :since AND accepted_at < :until
        ORDER BY accepted_at
        LIMIT :limit
    ) AS accepted
    UNION
    SELECT * FROM (
        SELECT delivery_id
        FROM deliveries
        WHERE session_id = :session_id AND started_at >= :since AND started_at < :until
        ORDER BY started_at
        LIMIT :limit
    ) AS began
)

SELECT
    session_id, deliveries.delivery_id, kind, digest, NULL AS body, turn, refused, accepted_at, ref, started_at,
    settled_at, outcome, error, edits, lane, mode, position, answered_by_turn
FROM found
INNER JOIN deliveries ON deliveries.session_id = :session_id AND deliveries.delivery_id = found.delivery_id
ORDER BY accepted_at, deliveries.delivery_id
LIMIT :limit
