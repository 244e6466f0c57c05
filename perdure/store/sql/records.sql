-- The session's own records, and those of the turns that it shares with the sessions before it. A fork's own record
-- of a shared turn only tells older code that there is more.
WITH RECURSIVE line (session_id, until_turn) AS (
    SELECT forked_from, forked_turns
    FROM sessions
    WHERE session_id = :session_id AND forked_from IS NOT NULL
    UNION ALL
    SELECT sessions.forked_from,
        CASE WHEN sessions.forked_turns < line.until_turn THEN sessions.forked_turns ELSE line.until_turn END
    FROM line
    JOIN sessions ON sessions.session_id = line.session_id
    WHERE sessions.forked_from IS NOT NULL
)
SELECT turn, step, slot, format, body, attempt, at
FROM records
WHERE session_id = :session_id AND turn >= :from_turn AND turn <= :to_turn AND format <> 'perdure/fork/1'
UNION ALL
SELECT records.turn, records.step, records.slot, records.format, records.body, records.attempt, records.at
FROM line
JOIN records ON records.session_id = line.session_id AND records.turn < line.until_turn
WHERE records.turn >= :from_turn AND records.turn <= :to_turn AND records.format <> 'perdure/fork/1'
ORDER BY turn, step, slot
