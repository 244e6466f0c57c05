UPDATE callbacks
SET due_at = :now,
    ended_at = :now
WHERE session_id = :session_id AND ended_at IS NULL AND settled IS NULL
