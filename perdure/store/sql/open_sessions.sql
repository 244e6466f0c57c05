SELECT session_id FROM sessions WHERE closed_at IS NULL AND session_id > :after ORDER BY session_id LIMIT :limit
