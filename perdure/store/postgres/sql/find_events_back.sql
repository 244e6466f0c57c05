SELECT idx, key, type, turn, step, attempt, data, delivery_ids, at
FROM events
WHERE session_id = :session_id
    AND idx > :after
    AND idx < :before
    AND (cardinality(CAST(:types AS text[])) = 0 OR type = ANY(CAST(:types AS text[])))
    AND type <> ALL(CAST(:exclude AS text[]))
    AND (CAST(:turn AS bigint) IS NULL OR turn = :turn)
    AND (CAST(:attempt AS bigint) IS NULL OR attempt = :attempt)
    AND (CAST(:delivery_id AS text) IS NULL OR jsonb_exists(CAST(delivery_ids AS jsonb), :delivery_id))
ORDER BY idx DESC
LIMIT :limit
