-- The messages that wait to enter the running turn, in order, in whatever lane they were accepted.
SELECT delivery_id
FROM deliveries
WHERE session_id = :session_id
    AND kind = 'message'
    AND mode = 'steer'
    AND turn IS NULL
    AND refused IS NULL
ORDER BY COALESCE(position, accepted_at), delivery_id
