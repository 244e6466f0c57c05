-- A root waits for the requests of its descendants as well.
SELECT request_id FROM inputs WHERE session_id = :session_id AND status = 'open'
UNION ALL
SELECT request_id FROM inputs WHERE root_id = :session_id AND status = 'open'
LIMIT 1
