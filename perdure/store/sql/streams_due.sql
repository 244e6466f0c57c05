SELECT stream_id FROM streams WHERE due_at <= :now ORDER BY due_at LIMIT :limit
