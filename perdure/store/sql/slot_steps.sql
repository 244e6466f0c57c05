SELECT step, since, version
FROM slot_steps
WHERE session_id = :session_id AND name = :name AND turn = :turn
ORDER BY step
