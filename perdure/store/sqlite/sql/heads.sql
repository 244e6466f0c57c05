SELECT session_id, next_index FROM sessions WHERE session_id IN (SELECT value FROM json_each(:session_ids))
