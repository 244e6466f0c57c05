SELECT
    COUNT(*) AS waiting,
    MAX(accepted_at) AS newest
FROM deliveries
WHERE session_id = :session_id AND turn IS NULL AND refused IS NULL
