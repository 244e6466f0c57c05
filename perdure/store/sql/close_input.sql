UPDATE inputs
SET status = :status,
    answer = :answer,
    closed_at = :now
WHERE request_id = :request_id AND session_id = :session_id AND status = 'open'
RETURNING request_id
