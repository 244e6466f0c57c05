UPDATE attempts
SET lease_expires_at = :lease_expires_at
WHERE session_id = :session_id
    AND turn = :turn
    AND step = :step
    AND scope = :scope
    AND generation = :generation
    AND status = 'running'
    AND lease_expires_at < :lease_expires_at
