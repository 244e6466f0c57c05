UPDATE slot_steps
SET session_id = :heir
WHERE session_id = :session_id AND turn >= :from_turn AND turn < :until_turn
