SELECT session_id FROM sessions WHERE parent_id = :session_id AND lane IS NULL ORDER BY session_id LIMIT :limit
