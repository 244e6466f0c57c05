SELECT version, value
FROM slot_steps
WHERE session_id = :session_id AND name = :name AND turn = :turn AND step = :step
