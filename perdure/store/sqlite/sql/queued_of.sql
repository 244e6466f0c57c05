SELECT session_id, COUNT(*) AS queued
FROM deliveries
WHERE session_id IN (SELECT value FROM json_each(:ids)) AND turn IS NULL AND refused IS NULL
GROUP BY session_id
