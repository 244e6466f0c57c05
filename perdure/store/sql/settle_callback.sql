UPDATE callbacks
SET settled = :outcome,
    due_at = NULL,
    callback = NULL
WHERE session_id = :session_id AND settled IS NULL
