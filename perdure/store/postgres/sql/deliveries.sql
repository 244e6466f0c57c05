SELECT session_id, delivery_id, digest, body, turn, refused, accepted_at
FROM deliveries
WHERE session_id = :session_id AND delivery_id = ANY(CAST(:delivery_ids AS text[]))
