SELECT turn, step, slot, format, body, attempt, at
FROM records
WHERE session_id = :session_id AND turn >= :from_turn AND turn <= :to_turn
ORDER BY turn, step, slot
