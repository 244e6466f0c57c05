-- What the steps of a turn have left in the slots is what the turn has left in them.
INSERT INTO slot_versions (session_id, name, turn, since, version, value)
SELECT last.session_id, last.name, last.turn,
    (
        SELECT MIN(steps.since)
        FROM slot_steps AS steps
        WHERE steps.session_id = last.session_id AND steps.name = last.name AND steps.turn = last.turn
    ),
    last.version, last.value
FROM slot_steps AS last
WHERE last.session_id = :session_id
    AND last.turn = :turn
    AND last.step = (
        SELECT MAX(steps.step)
        FROM slot_steps AS steps
        WHERE steps.session_id = last.session_id AND steps.name = last.name AND steps.turn = last.turn
    )
