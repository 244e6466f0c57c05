DELETE FROM dead_letters
WHERE session_id = :session_id
    AND dead_letter_id IN (SELECT dead_letter_id FROM dead_letters WHERE session_id = :session_id LIMIT :limit)
RETURNING dead_letter_id
