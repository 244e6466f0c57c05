INSERT INTO records (session_id, turn, step, slot, format, body, attempt, at)
VALUES (:session_id, :turn, :step, :slot, :format, :body, :attempt, :now)
ON CONFLICT DO NOTHING
