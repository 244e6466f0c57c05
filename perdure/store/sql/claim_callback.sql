UPDATE callbacks
SET due_at = :until,
    tries = tries + 1
WHERE session_id = :session_id AND due_at IS NOT NULL AND due_at <= :now
RETURNING callback, tries, ended_at
