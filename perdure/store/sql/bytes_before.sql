SELECT COUNT(*) AS items, COALESCE(SUM(size), 0) AS bytes FROM stream_items WHERE stream_id = :stream_id AND idx < :until
