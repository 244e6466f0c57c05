SELECT * FROM deliveries WHERE owner = :owner AND idempotency_key = :idempotency_key
