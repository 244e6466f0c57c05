INSERT INTO stream_items (stream_id, idx, batch, size, data)
SELECT :stream_id, idx, batch, size, data
FROM stream_items
WHERE stream_id = :source AND idx < :until
