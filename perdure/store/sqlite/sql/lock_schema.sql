-- BEGIN IMMEDIATE already holds the only write lock of the database.
SELECT 1
