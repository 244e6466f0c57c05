DELETE FROM events
WHERE session_id = :session_id
    AND key >= :first
    AND key < :until
    AND type IN ('message.appended', 'reasoning.appended', 'action.input.appended')
