SELECT idx, key, type, turn, step, attempt, data, delivery_ids, at
FROM events
WHERE session_id = :session_id
    AND idx > :after
    AND idx < :before
    AND (json_array_length(:types) = 0 OR type IN (SELECT value FROM json_each(:types)))
    AND type NOT IN (SELECT value FROM json_each(:exclude))
    AND (CAST(:turn AS bigint) IS NULL OR turn = :turn)
    AND (CAST(:attempt AS bigint) IS NULL OR attempt = :attempt)
    AND (CAST(:delivery_id AS text) IS NULL OR EXISTS (SELECT 1 FROM json_each(delivery_ids) WHERE value = :delivery_id))
ORDER BY idx
LIMIT :limit
