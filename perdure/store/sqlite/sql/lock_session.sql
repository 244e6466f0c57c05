-- BEGIN IMMEDIATE holds the only write lock there is.
SELECT * FROM sessions WHERE session_id = :session_id
