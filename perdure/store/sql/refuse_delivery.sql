UPDATE deliveries
SET refused = :code,
    body = NULL
WHERE session_id = :session_id AND delivery_id = :delivery_id
