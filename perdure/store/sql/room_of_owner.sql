SELECT COUNT(*) AS streams, COALESCE(SUM(bytes), 0) AS bytes FROM streams WHERE owner = :owner AND path IS NOT NULL
