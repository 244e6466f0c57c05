SELECT *
FROM sessions
WHERE (created_at, session_id) < (:created_at, :session_id)
    AND (CAST(:agent AS text) IS NULL OR agent = :agent)
    AND (CAST(:status AS text) IS NULL OR status = :status)
    AND (CAST(:mode AS text) IS NULL OR mode = :mode)
ORDER BY created_at DESC, session_id DESC
LIMIT :limit
