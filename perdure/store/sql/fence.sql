SELECT generation, attempt
FROM fences
WHERE session_id = :session_id AND turn = :turn AND step = :step AND scope = :scope
