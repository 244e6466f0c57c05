-- Two queries, because each of them has an index in this order.
SELECT request_id, session_id, status, requester, request, votes, answer, delivery_id, opened_at, closed_at
FROM inputs
WHERE session_id = :root
    AND (opened_at, request_id) > (:opened_at, :request_id)
    AND (CAST(:agent AS text) IS NULL OR agent = :agent)
    AND (CAST(:kind AS text) IS NULL OR kind = :kind)
    AND (CAST(:status AS text) IS NULL OR status = :status)
UNION ALL
SELECT request_id, session_id, status, requester, request, votes, answer, delivery_id, opened_at, closed_at
FROM inputs
WHERE root_id = :root
    AND (opened_at, request_id) > (:opened_at, :request_id)
    AND (CAST(:agent AS text) IS NULL OR agent = :agent)
    AND (CAST(:kind AS text) IS NULL OR kind = :kind)
    AND (CAST(:status AS text) IS NULL OR status = :status)
ORDER BY opened_at, request_id
LIMIT :limit
