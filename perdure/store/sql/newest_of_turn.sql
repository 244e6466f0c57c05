-- The keys of a turn's events begin with its number. The answers to its requests come later, and have keys of the session.
SELECT MAX(at) AS newest
FROM events
WHERE session_id = :session_id
    AND (
        (key >= :first AND key < :until)
        OR (key >= 'session/input/' AND key < 'session/input0' AND type = 'input.resolved' AND turn <= :turn)
    )
