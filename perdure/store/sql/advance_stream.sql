UPDATE streams
SET next_index = :next_index, bytes = bytes + :added, version = version + 1, closed = :closed, closed_by = :closed_by,
    last_sequence = :last_sequence, due_at = :due_at
WHERE stream_id = :stream_id
