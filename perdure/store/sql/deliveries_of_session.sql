SELECT
    session_id, delivery_id, kind, digest, NULL AS body, turn, refused, accepted_at, ref, started_at, settled_at, outcome,
    error, edits, lane, mode, position, answered_by_turn
FROM deliveries
WHERE session_id = :session_id
    AND (accepted_at, delivery_id) < (:accepted_at, :delivery_id)
    AND (
        CAST(:status AS text) IS NULL
        OR :status = CASE
            WHEN outcome IS NOT NULL OR refused IS NOT NULL THEN 'settled'
            WHEN turn IS NULL THEN 'queued'
            ELSE 'running'
        END
    )
ORDER BY accepted_at DESC, delivery_id DESC
LIMIT :limit
