-- A deleted stream with living forks keeps its row, for its path.
SELECT stream_id, path
FROM streams
WHERE deleted_at IS NOT NULL
    AND (path IS NULL OR EXISTS (SELECT 1 FROM stream_items WHERE stream_items.stream_id = streams.stream_id))
ORDER BY deleted_at, stream_id
LIMIT :limit
