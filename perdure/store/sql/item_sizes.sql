SELECT idx, size
FROM stream_items
WHERE stream_id = :stream_id AND idx >= :start
ORDER BY idx
LIMIT :limit
