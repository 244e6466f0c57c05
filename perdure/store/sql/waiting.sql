SELECT
    COUNT(*) AS waiting,
    MAX(accepted_at) AS newest,
    MIN(accepted_at) AS oldest
FROM deliveries
WHERE session_id = :session_id AND turn IS NULL AND refused IS NULL
