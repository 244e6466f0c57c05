SELECT idx + 1 AS end_idx
FROM stream_items
WHERE stream_id = :stream_id AND idx >= :start AND batch = :batch
ORDER BY idx DESC
LIMIT 1
