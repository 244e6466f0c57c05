SELECT idx, key, type, turn, step, attempt, data, delivery_ids, at
FROM events
WHERE session_id = :session_id AND idx >= :start
ORDER BY idx
LIMIT :limit
