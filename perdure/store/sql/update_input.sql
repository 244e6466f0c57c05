UPDATE inputs
SET status = :status,
    votes = :votes,
    answer = :answer,
    delivery_id = :delivery_id,
    closed_at = :closed_at
WHERE request_id = :request_id
