SELECT session_id, turn, agent, code, message, failed_at, requeued_at, dead_letter_id
FROM dead_letters
WHERE dead_letter_id = :dead_letter_id
