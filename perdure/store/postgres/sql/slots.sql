SELECT name, value, version
FROM slots
WHERE session_id = :session_id AND name = ANY(CAST(:names AS text[]))
