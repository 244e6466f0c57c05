SELECT session_id, owner_hash, requested_at, finished_at, counts FROM deletions WHERE session_id = :session_id
