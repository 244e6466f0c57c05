SELECT attempts.*, fences.generation AS held
FROM attempts
LEFT JOIN fences ON
    fences.session_id = attempts.session_id
    AND fences.turn = attempts.turn
    AND fences.step = attempts.step
    AND fences.scope = attempts.scope
WHERE attempts.session_id = :session_id
    AND attempts.turn >= :first
    AND attempts.turn <= :last
    AND (attempts.turn, attempts.step, attempts.scope, attempts.number) > (:turn, :step, :scope, :number)
ORDER BY attempts.turn, attempts.step, attempts.scope, attempts.number
LIMIT :limit
