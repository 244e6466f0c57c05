INSERT INTO inputs (request_id, session_id, root_id, agent, kind, status, requester, request, opened_at)
VALUES (:request_id, :session_id, :root_id, :agent, :kind, 'open', :requester, :request, :now)
ON CONFLICT DO NOTHING
