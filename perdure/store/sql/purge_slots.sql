DELETE FROM slots
WHERE session_id = :session_id AND name IN (SELECT name FROM slots WHERE session_id = :session_id LIMIT :limit)
RETURNING name
