DELETE FROM events
WHERE session_id = :session_id
    AND (
        (
            key >= :first
            AND key < :until
            AND type IN (
                'message.appended', 'reasoning.appended', 'action.input.appended',
                'message.received', 'message.completed', 'reasoning.completed', 'actions.requested', 'action.result',
                'result.completed', 'input.requested', 'subagent.completed', 'run.log'
            )
        )
        -- A request may have been answered after its turn had expired.
        OR (key >= 'session/input/' AND key < 'session/input0' AND type = 'input.resolved' AND turn <= :turn)
    )
