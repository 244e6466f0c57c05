-- Its number is that of Temporal, unless an earlier attempt has it: Temporal begins again when work is scheduled again.
INSERT INTO attempts (
    session_id, turn, step, scope, number, attempt_id, generation, worker, started_at, lease_expires_at, status
)
SELECT
    :session_id, :turn, :step, :scope,
    CASE WHEN newest < :number THEN :number ELSE newest + 1 END,
    :attempt_id, :generation, :worker, :now, :lease_expires_at, 'running'
FROM (
    SELECT coalesce(max(number), 0) AS newest
    FROM attempts
    WHERE session_id = :session_id AND turn = :turn AND step = :step AND scope = :scope
) AS earlier
WHERE NOT EXISTS (
    SELECT 1
    FROM attempts
    WHERE session_id = :session_id
        AND turn = :turn
        AND step = :step
        AND scope = :scope
        AND generation = :generation
)
