SELECT session_id, finished_at, counts FROM deletions WHERE part_of = :session_id ORDER BY session_id
