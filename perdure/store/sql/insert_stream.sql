INSERT INTO streams (
    stream_id, owner, path, content_type, request, next_index, bytes, closed, ttl, expires_at, due_at, forked_from,
    created_at
)
VALUES (
    :stream_id, :owner, :path, :content_type, :request, :next_index, :bytes, :closed, :ttl, :expires_at, :due_at,
    :forked_from, :now
)
ON CONFLICT DO NOTHING
RETURNING stream_id
