DELETE FROM stream_items
WHERE stream_id = :stream_id AND idx IN (
    SELECT idx FROM stream_items WHERE stream_id = :stream_id ORDER BY idx LIMIT :limit
)
RETURNING idx
