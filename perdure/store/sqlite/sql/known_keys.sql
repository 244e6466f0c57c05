SELECT key FROM events WHERE session_id = :session_id AND key IN (SELECT value FROM json_each(:keys))
