INSERT INTO records (session_id, turn, step, slot, format, body, attempt, at)
SELECT CAST(:session_id AS text), turn, step, slot, format, body, attempt, at
FROM records
WHERE session_id = :owner AND turn = :turn AND step <= :step AND format <> 'perdure/fork/1'
