INSERT INTO fences (session_id, turn, step, scope, attempt, generation)
VALUES (:session_id, :turn, :step, :scope, :attempt, :generation)
ON CONFLICT (session_id, turn, step, scope) DO UPDATE
SET attempt = excluded.attempt,
    generation = excluded.generation
