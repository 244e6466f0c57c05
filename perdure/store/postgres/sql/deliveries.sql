SELECT * FROM deliveries WHERE session_id = :session_id AND delivery_id = ANY(CAST(:delivery_ids AS text[]))
