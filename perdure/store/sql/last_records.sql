-- The turns of the last records before :until_turn.
SELECT turn
FROM records
WHERE session_id = :session_id AND turn >= :from_turn AND turn < :until_turn
ORDER BY turn DESC, step DESC, slot DESC
LIMIT :limit
