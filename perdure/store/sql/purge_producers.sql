DELETE FROM stream_producers
WHERE stream_id = :stream_id AND producer_id IN (
    SELECT producer_id FROM stream_producers WHERE stream_id = :stream_id ORDER BY producer_id LIMIT :limit
)
RETURNING producer_id
