INSERT INTO events (session_id, idx, key, type, turn, step, attempt, data, delivery_ids, at)
VALUES (:session_id, :idx, :key, :type, :turn, :step, :attempt, :data, :delivery_ids, :now)
