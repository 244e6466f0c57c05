UPDATE deletions SET counts = :counts WHERE session_id = :session_id
