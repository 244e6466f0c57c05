UPDATE inputs
SET status = 'withdrawn',
    closed_at = :now
WHERE session_id = :session_id AND status = 'open'
RETURNING request_id
