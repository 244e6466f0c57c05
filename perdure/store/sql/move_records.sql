UPDATE records
SET session_id = :heir
WHERE session_id = :session_id AND turn >= :from_turn AND turn < :until_turn AND format <> 'perdure/fork/1'
RETURNING turn
