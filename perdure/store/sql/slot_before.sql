-- What the last turn up to this one has written to the slot.
WITH RECURSIVE line (session_id, until_turn) AS (
    SELECT session_id, 9007199254740992 FROM sessions WHERE session_id = :session_id
    UNION ALL
    SELECT sessions.forked_from,
        CASE WHEN sessions.forked_turns < line.until_turn THEN sessions.forked_turns ELSE line.until_turn END
    FROM line
    JOIN sessions ON sessions.session_id = line.session_id
    WHERE sessions.forked_from IS NOT NULL
)
SELECT slot_versions.version, slot_versions.value
FROM line
JOIN slot_versions ON slot_versions.session_id = line.session_id AND slot_versions.turn < line.until_turn
WHERE slot_versions.name = :name AND slot_versions.turn <= :turn
ORDER BY slot_versions.turn DESC
LIMIT 1
