SELECT session_id, COUNT(*) AS queued
FROM deliveries
WHERE session_id = ANY(CAST(:ids AS text[])) AND turn IS NULL AND refused IS NULL
GROUP BY session_id
