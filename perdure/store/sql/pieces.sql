-- The pieces of a reply of all attempts, and where they were retracted. Their keys begin with the generation of their
-- attempt: `t0/s0/g…`.
SELECT type, data
FROM events
WHERE session_id = :session_id
    AND key >= :first
    AND key < :until
    AND type IN ('message.appended', 'reasoning.appended', 'action.input.appended', 'step.superseded')
ORDER BY idx
