UPDATE deletions SET part_of = :part_of WHERE session_id = :session_id AND part_of IS NULL
