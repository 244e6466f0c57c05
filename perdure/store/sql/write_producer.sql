INSERT INTO stream_producers (stream_id, producer_id, epoch, seq)
VALUES (:stream_id, :producer_id, :epoch, :seq)
ON CONFLICT (stream_id, producer_id) DO UPDATE SET epoch = excluded.epoch, seq = excluded.seq
