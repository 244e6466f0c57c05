SELECT idx, data
FROM stream_items
WHERE stream_id = :stream_id AND idx >= :start AND idx < :until
ORDER BY idx
