SELECT
    deliveries.session_id, deliveries.delivery_id, deliveries.digest, deliveries.body, deliveries.turn,
    deliveries.refused, deliveries.accepted_at
FROM deliveries
JOIN sessions ON sessions.session_id = deliveries.session_id
WHERE deliveries.kind = :kind
    AND deliveries.turn IS NULL
    AND deliveries.refused IS NULL
    AND deliveries.accepted_at < :before
    AND (CAST(:session_id AS text) IS NULL OR deliveries.session_id = :session_id)
    AND sessions.closed_at IS NULL
    AND sessions.status NOT IN ('completed', 'failed')
ORDER BY deliveries.accepted_at
LIMIT :limit
