SELECT session_id, next_index FROM sessions WHERE session_id = ANY(CAST(:session_ids AS text[]))
UNION ALL
SELECT stream_id, version FROM streams WHERE stream_id = ANY(CAST(:session_ids AS text[])) AND deleted_at IS NULL
