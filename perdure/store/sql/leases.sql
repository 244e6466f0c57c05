-- The fences are few: one for each scope in which an attempt works, or has failed and is to be repeated.
SELECT attempts.*, fences.generation AS held
FROM fences
INNER JOIN attempts ON
    attempts.session_id = fences.session_id
    AND attempts.turn = fences.turn
    AND attempts.step = fences.step
    AND attempts.scope = fences.scope
    AND attempts.generation = fences.generation
WHERE attempts.status = 'running'
    AND (attempts.started_at, attempts.attempt_id) > (:started_at, :attempt_id)
ORDER BY attempts.started_at, attempts.attempt_id
LIMIT :limit
