-- The session that has the records of this turn: this one, or one of those that it shares turns with.
WITH RECURSIVE line (session_id, forked_from, forked_turns) AS (
    SELECT session_id, forked_from, forked_turns FROM sessions WHERE session_id = :session_id
    UNION ALL
    SELECT sessions.session_id, sessions.forked_from, sessions.forked_turns
    FROM line
    JOIN sessions ON sessions.session_id = line.forked_from
    WHERE line.forked_turns > :turn
)
SELECT session_id FROM line WHERE forked_turns <= :turn
