SELECT idx FROM events WHERE session_id = :session_id AND key = :key
