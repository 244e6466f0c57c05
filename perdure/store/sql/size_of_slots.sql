SELECT COALESCE(SUM(LENGTH(value)), 0) AS size FROM slots WHERE session_id = :session_id
