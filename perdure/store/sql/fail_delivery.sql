UPDATE deliveries
SET outcome = 'failed',
    error = :error
WHERE session_id = :session_id
    AND delivery_id = :delivery_id
    AND settled_at = :now
