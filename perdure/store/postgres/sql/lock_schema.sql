-- The number is 'perdure' in ASCII; held until the transaction ends.
SELECT pg_advisory_xact_lock(31636739377689189)
