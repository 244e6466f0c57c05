SELECT turn, step, slot, format, body, attempt, at
FROM records
WHERE session_id = :session_id AND turn = :turn AND step = :step AND slot = :slot
