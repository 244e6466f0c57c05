UPDATE runs
SET status = :status,
    ended_at = :now,
    duration_ms = :duration_ms,
    result = :result,
    error = :error,
    waiting_for = NULL
WHERE session_id = :session_id AND status = 'active'
