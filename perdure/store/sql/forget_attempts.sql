-- Not those that still run, which few do for so long.
DELETE FROM attempts
WHERE (session_id, turn, step, scope, number) IN (
    SELECT old.session_id, old.turn, old.step, old.scope, old.number
    FROM attempts AS old
    LEFT JOIN fences ON
        fences.session_id = old.session_id
        AND fences.turn = old.turn
        AND fences.step = old.step
        AND fences.scope = old.scope
        AND fences.generation = old.generation
    WHERE old.started_at < :before AND (old.status <> 'running' OR fences.generation IS NULL)
    ORDER BY old.started_at
    LIMIT :limit
)
RETURNING number
