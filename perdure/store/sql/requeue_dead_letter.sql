UPDATE dead_letters
SET requeued_at = :now
WHERE dead_letter_id = :dead_letter_id
    AND requeued_at IS NULL
