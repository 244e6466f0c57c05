-- Its readers find it gone. Its path is free again if it is given away.
UPDATE streams
SET deleted_at = COALESCE(deleted_at, :now), due_at = NULL, bytes = 0, path = CASE WHEN :keeps_path = 1 THEN path END
WHERE stream_id = :stream_id
