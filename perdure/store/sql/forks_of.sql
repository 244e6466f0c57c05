SELECT session_id, forked_turns
FROM sessions
WHERE forked_from = :session_id
ORDER BY forked_turns DESC, session_id
LIMIT 1
