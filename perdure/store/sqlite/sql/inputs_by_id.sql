SELECT request_id, session_id, status, requester, request, votes, answer, delivery_id, opened_at, closed_at
FROM inputs
WHERE request_id IN (SELECT value FROM json_each(:request_ids))
