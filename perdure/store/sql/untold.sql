-- Sessions whose workflow may not have received everything that was accepted. Each part has its own index, starts after
-- :after and returns at most a page, so that the cost of a page does not grow with the number of waiting sessions.
SELECT session_id, MAX(newest) AS newest, MAX(cancel_turn) AS cancel_turn, MAX(untold) AS untold
FROM (
    SELECT session_id, newest, NULL AS cancel_turn, 0 AS untold
    FROM (
        SELECT session_id, MAX(accepted_at) AS newest
        FROM deliveries
        WHERE turn IS NULL AND refused IS NULL AND session_id > :after AND accepted_at < :before
        GROUP BY session_id
        ORDER BY session_id
        LIMIT :limit
    ) AS waiting
    UNION ALL
    SELECT session_id, NULL, cancel_turn, 0
    FROM (
        SELECT session_id, cancel_turn
        FROM sessions
        WHERE cancel_turn IS NOT NULL AND session_id > :after
        ORDER BY session_id
        LIMIT :limit
    ) AS to_cancel
    UNION ALL
    SELECT session_id, NULL, NULL, 0
    FROM (
        SELECT session_id
        FROM sessions
        WHERE status = 'starting' AND created_at < :before AND session_id > :after
        ORDER BY session_id
        LIMIT :limit
    ) AS starting
    UNION ALL
    SELECT session_id, NULL, NULL, untold
    FROM (
        SELECT session_id, untold
        FROM sessions
        WHERE untold <> 0 AND session_id > :after
        ORDER BY session_id
        LIMIT :limit
    ) AS marked
) AS found
GROUP BY session_id
ORDER BY session_id
LIMIT :limit
