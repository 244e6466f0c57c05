INSERT INTO checkpoints (session_id, number, checkpoint_id, name, plan_step, turn, step, taken_at, snapshot, size)
VALUES (:session_id, :number, :checkpoint_id, :name, :plan_step, :turn, :step, :now, :snapshot, :size)
ON CONFLICT DO NOTHING
