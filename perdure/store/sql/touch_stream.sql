UPDATE streams
SET due_at = :due_at
WHERE stream_id = :stream_id AND deleted_at IS NULL AND due_at > :now
