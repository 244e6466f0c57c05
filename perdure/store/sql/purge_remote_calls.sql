DELETE FROM remote_calls
WHERE session_id = :session_id
    AND action IN (SELECT action FROM remote_calls WHERE session_id = :session_id LIMIT :limit)
RETURNING action
