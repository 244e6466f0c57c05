SELECT name, value, version FROM slots WHERE session_id = :session_id ORDER BY name
