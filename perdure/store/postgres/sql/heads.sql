SELECT session_id, next_index FROM sessions WHERE session_id = ANY(CAST(:session_ids AS text[]))
