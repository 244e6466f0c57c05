INSERT INTO stream_items (stream_id, idx, batch, size, data)
VALUES (:stream_id, :idx, :batch, :size, :data)
