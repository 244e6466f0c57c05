UPDATE deliveries
SET refused = :code,
    outcome = CASE WHEN :code IN ('withdrawn', 'superseded') THEN :code ELSE 'refused' END,
    settled_at = :now,
    body = NULL
WHERE session_id = :session_id AND delivery_id = :delivery_id
