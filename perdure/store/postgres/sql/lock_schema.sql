-- The number is 'perdure' in ASCII. The lock is held until the transaction ends.
SELECT pg_advisory_xact_lock(31636739377689189)
