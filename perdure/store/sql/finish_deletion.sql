UPDATE deletions SET finished_at = :now WHERE session_id = :session_id AND finished_at IS NULL
