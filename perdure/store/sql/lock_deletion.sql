-- An update locks the row on both databases.
UPDATE deletions SET counts = counts WHERE session_id = :session_id RETURNING finished_at, counts
