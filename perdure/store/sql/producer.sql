SELECT epoch, seq FROM stream_producers WHERE stream_id = :stream_id AND producer_id = :producer_id
