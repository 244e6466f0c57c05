SELECT session_id, number, checkpoint_id, name, plan_step, turn, step, taken_at, NULL AS snapshot, size
FROM checkpoints
WHERE session_id = :session_id AND number < :before
ORDER BY number DESC
LIMIT :limit
