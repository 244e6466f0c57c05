DELETE FROM streams WHERE stream_id = :stream_id AND path IS NULL
