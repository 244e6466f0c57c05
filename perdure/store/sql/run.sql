SELECT
    session_id, workflow_name, status, started_at, ended_at, duration_ms, input, result, error, trace_carrier, waiting_for,
    attempts
FROM runs
WHERE session_id = :session_id
