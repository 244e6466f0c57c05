UPDATE sessions SET tags = :tags WHERE session_id = :session_id
