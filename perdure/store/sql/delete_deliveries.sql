DELETE FROM deliveries WHERE session_id = :session_id
