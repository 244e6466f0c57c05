SELECT session_id, next_index FROM sessions WHERE session_id IN (SELECT value FROM json_each(:session_ids))
UNION ALL
SELECT stream_id, version FROM streams
WHERE stream_id IN (SELECT value FROM json_each(:session_ids)) AND deleted_at IS NULL
