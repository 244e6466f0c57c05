SELECT name, value, version
FROM slots
WHERE session_id = :session_id AND name IN (SELECT value FROM json_each(:names))
