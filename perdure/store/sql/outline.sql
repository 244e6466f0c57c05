-- The records of one turn, as records.sql finds them. The bodies of those that do not say how the turn, or this step of
-- it, has ended stay where they are: they may be large.
WITH RECURSIVE line (session_id, forked_from, forked_turns) AS (
    SELECT session_id, forked_from, forked_turns FROM sessions WHERE session_id = :session_id
    UNION ALL
    SELECT sessions.session_id, sessions.forked_from, sessions.forked_turns
    FROM line
    JOIN sessions ON sessions.session_id = line.forked_from
    WHERE line.forked_turns > :turn
), found AS (
    SELECT records.session_id, records.turn, records.step, records.slot
    FROM line
    JOIN records ON records.session_id = line.session_id
    WHERE line.forked_turns <= :turn AND records.turn = :turn AND records.format <> 'perdure/fork/1'
)
SELECT records.turn, records.step, records.slot, records.format, records.attempt, records.at,
    CASE
        WHEN substr(records.format, 1, 16) = 'perdure/failure/'
            OR substr(records.format, 1, 13) = 'perdure/park/'
            OR substr(records.format, 1, 19) = 'perdure/resumption/'
            OR (
                records.slot = 'reply'
                AND (records.step = :step OR records.step = (SELECT MAX(found.step) FROM found))
            )
            THEN records.body
        ELSE '{}'
    END AS body
FROM found
JOIN records ON records.session_id = found.session_id AND records.turn = found.turn
    AND records.step = found.step AND records.slot = found.slot
ORDER BY records.step, records.slot
