UPDATE callbacks
SET due_at = :due_at
WHERE session_id = :session_id AND tries = :tries AND settled IS NULL
