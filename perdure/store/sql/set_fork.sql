UPDATE sessions
SET forked_from = CAST(:forked_from AS text),
    forked_turns = :forked_turns,
    fork_place = NULL
WHERE session_id = :session_id
