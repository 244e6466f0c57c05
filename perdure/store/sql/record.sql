SELECT *
FROM records
WHERE session_id = :session_id AND turn = :turn AND step = :step AND slot = :slot
