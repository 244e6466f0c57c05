-- Whether pieces of a reply were stored. Their keys begin with the generation of their attempt: `t0/s0/g…`.
SELECT 1 AS found
FROM events
WHERE session_id = :session_id
    AND key >= :first
    AND key < :until
    AND type IN ('message.appended', 'reasoning.appended', 'action.input.appended')
LIMIT 1
