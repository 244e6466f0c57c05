-- Those that began or ended in this time, each with the attempt before it in its scope.
WITH found AS (
    SELECT * FROM (
        SELECT turn, step, scope, number
        FROM attempts
        WHERE session_id = :session_id AND started_at >= :since AND started_at < :until
        ORDER BY started_at
        LIMIT :limit
    ) AS began
    UNION
    SELECT * FROM (
        SELECT turn, step, scope, number
        FROM attempts
        WHERE session_id = :session_id AND ended_at >= :since AND ended_at < :until
        ORDER BY ended_at
        LIMIT :limit
    ) AS ended
)

SELECT
    attempts.*,
    fences.generation AS held,
    earlier.attempt_id AS before_id,
    earlier.status AS before_status,
    earlier.error AS before_error
FROM found
INNER JOIN attempts ON
    attempts.session_id = :session_id
    AND attempts.turn = found.turn
    AND attempts.step = found.step
    AND attempts.scope = found.scope
    AND attempts.number = found.number
LEFT JOIN fences ON
    fences.session_id = attempts.session_id
    AND fences.turn = attempts.turn
    AND fences.step = attempts.step
    AND fences.scope = attempts.scope
LEFT JOIN attempts AS earlier ON
    earlier.session_id = attempts.session_id
    AND earlier.turn = attempts.turn
    AND earlier.step = attempts.step
    AND earlier.scope = attempts.scope
    AND earlier.number = (
        SELECT max(others.number)
        FROM attempts AS others
        WHERE others.session_id = attempts.session_id
            AND others.turn = attempts.turn
            AND others.step = attempts.step
            AND others.scope = attempts.scope
            AND others.number < attempts.number
    )
ORDER BY attempts.started_at, attempts.attempt_id
LIMIT :limit
