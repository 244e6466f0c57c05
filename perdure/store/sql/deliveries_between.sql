-- Those that were accepted, or read by a turn, in this time.
SELECT
    session_id, delivery_id, kind, digest, NULL AS body, turn, refused, accepted_at, ref, started_at, settled_at, outcome,
    error, edits
FROM deliveries
WHERE session_id = :session_id
    AND ((accepted_at >= :since AND accepted_at < :until) OR (started_at >= :since AND started_at < :until))
ORDER BY accepted_at, delivery_id
LIMIT :limit
