SELECT
    stream_id, owner, path, content_type, request, next_index, version, closed, closed_by, last_sequence, ttl, expires_at,
    due_at, forked_from, deleted_at
FROM streams
WHERE stream_id = :stream_id
