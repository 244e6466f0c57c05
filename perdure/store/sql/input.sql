SELECT request_id, session_id, status, requester, request, votes, answer, delivery_id, opened_at, closed_at
FROM inputs
WHERE request_id = :request_id
