SELECT key FROM events WHERE session_id = :session_id AND key = ANY(CAST(:keys AS text[]))
