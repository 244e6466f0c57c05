DELETE FROM callbacks
WHERE session_id = :session_id
    AND settled IS NOT NULL
    AND NOT EXISTS (SELECT 1 FROM sessions WHERE session_id = :session_id)
