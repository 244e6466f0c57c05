SELECT
    session_id, workflow_name, status, started_at, ended_at, duration_ms, NULL AS input, NULL AS result, NULL AS error,
    NULL AS trace_carrier, waiting_for, attempts
FROM runs
WHERE (started_at, session_id) < (:started_at, :session_id)
    AND workflow_name = :name
    AND (CAST(:status AS text) IS NULL OR status = :status)
ORDER BY started_at DESC, session_id DESC
LIMIT :limit
