UPDATE attempts
SET status = 'superseded',
    ended_at = :now,
    error = CASE WHEN lease_expires_at < :now THEN :expired ELSE :taken END
WHERE session_id = :session_id
    AND turn = :turn
    AND step = :step
    AND scope = :scope
    AND status = 'running'
    AND generation <> :generation
