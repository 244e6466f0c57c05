SELECT path FROM streams WHERE owner = :owner AND path IS NOT NULL AND deleted_at IS NULL ORDER BY path LIMIT :limit
