-- The status is a literal, so that the partial index of open requests can be used.
SELECT request_id, session_id, status, requester, request, votes, answer, delivery_id, opened_at, closed_at
FROM inputs
WHERE status = 'open'
    AND (opened_at, request_id) > (:opened_at, :request_id)
    AND (CAST(:agent AS text) IS NULL OR agent = :agent)
    AND (CAST(:kind AS text) IS NULL OR kind = :kind)
ORDER BY opened_at, request_id
LIMIT :limit
