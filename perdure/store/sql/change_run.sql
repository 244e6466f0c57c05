UPDATE runs
SET waiting_for = :waiting_for,
    attempts = attempts + :attempts
WHERE session_id = :session_id AND status = 'active'
