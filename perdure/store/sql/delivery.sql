SELECT * FROM deliveries WHERE session_id = :session_id AND delivery_id = :delivery_id
