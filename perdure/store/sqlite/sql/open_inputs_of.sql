-- Two queries, because each of them has an index.
SELECT
    session_id AS listed, request_id, session_id, status, requester, request, votes, answer, delivery_id, opened_at, closed_at
FROM inputs
WHERE session_id IN (SELECT value FROM json_each(:ids)) AND status = 'open'
UNION ALL
SELECT
    root_id AS listed, request_id, session_id, status, requester, request, votes, answer, delivery_id, opened_at, closed_at
FROM inputs
WHERE root_id IN (SELECT value FROM json_each(:ids)) AND status = 'open'
ORDER BY opened_at, request_id
