-- Those that began or ended in this time, each with the attempt before it in its scope.
SELECT *
FROM (
    SELECT
        attempts.*,
        fences.generation AS held,
        lag(attempts.attempt_id) OVER scopes AS before_id,
        lag(attempts.status) OVER scopes AS before_status,
        lag(attempts.error) OVER scopes AS before_error
    FROM attempts
    LEFT JOIN fences ON
        fences.session_id = attempts.session_id
        AND fences.turn = attempts.turn
        AND fences.step = attempts.step
        AND fences.scope = attempts.scope
    WHERE attempts.session_id = :session_id
    WINDOW scopes AS (PARTITION BY attempts.turn, attempts.step, attempts.scope ORDER BY attempts.number)
) AS found
WHERE (started_at >= :since AND started_at < :until) OR (ended_at >= :since AND ended_at < :until)
ORDER BY started_at, attempt_id
LIMIT :limit
