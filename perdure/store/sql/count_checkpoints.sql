SELECT COALESCE(MAX(number), 0) AS last, COUNT(name) AS named
FROM checkpoints
WHERE session_id = :session_id
