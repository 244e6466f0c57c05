SELECT COUNT(*) AS place
FROM deliveries
WHERE session_id = :session_id
    AND lane = :lane
    AND turn IS NULL
    AND refused IS NULL
    AND (COALESCE(position, accepted_at), delivery_id) <= (:place, :delivery_id)
