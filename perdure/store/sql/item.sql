SELECT idx, batch, size, data FROM stream_items WHERE stream_id = :stream_id AND idx = :idx
