DELETE FROM deletions WHERE session_id = :session_id AND finished_at IS NOT NULL
