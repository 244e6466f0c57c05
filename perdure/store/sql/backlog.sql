-- Each number is counted up to :most, in an index, so that the cost does not grow with the number of sessions.
SELECT 'starting' AS what, COUNT(*) AS number
FROM (SELECT 1 FROM sessions WHERE status = 'starting' LIMIT :most) AS starting
UNION ALL
SELECT 'running', COUNT(*) FROM (SELECT 1 FROM sessions WHERE status = 'running' LIMIT :most) AS running
UNION ALL
SELECT 'waiting', COUNT(*) FROM (SELECT 1 FROM sessions WHERE status = 'waiting' LIMIT :most) AS waiting
UNION ALL
SELECT 'in_need', COUNT(*) FROM (SELECT 1 FROM sessions WHERE attention IS NOT NULL LIMIT :most) AS in_need
UNION ALL
SELECT 'inputs', COUNT(*) FROM (SELECT 1 FROM inputs WHERE status = 'open' LIMIT :most) AS inputs
UNION ALL
SELECT 'deliveries', COUNT(*)
FROM (SELECT 1 FROM deliveries WHERE turn IS NULL AND refused IS NULL LIMIT :most) AS deliveries
