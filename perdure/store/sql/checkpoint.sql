SELECT session_id, number, checkpoint_id, name, plan_step, turn, step, taken_at, snapshot, size
FROM checkpoints
WHERE session_id = :session_id AND checkpoint_id = :checkpoint_id
