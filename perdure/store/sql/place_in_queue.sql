SELECT COUNT(*) AS place
FROM deliveries
WHERE session_id = :session_id
    AND turn IS NULL
    AND refused IS NULL
    AND (accepted_at, delivery_id) <= (:accepted_at, :delivery_id)
