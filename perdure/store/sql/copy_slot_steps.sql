INSERT INTO slot_steps (session_id, name, turn, step, since, version, value)
SELECT CAST(:session_id AS text), name, turn, step, since, version, value
FROM slot_steps
WHERE session_id = :owner AND turn = :turn AND step <= :step
