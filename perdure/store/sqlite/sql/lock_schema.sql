-- BEGIN IMMEDIATE holds the only write lock there is.
SELECT 1
