UPDATE deliveries
SET turn = :turn,
    body = NULL,
    started_at = COALESCE(started_at, :now),
    -- What is no message and no answer is done when it is read.
    outcome = CASE WHEN kind IN ('message', 'answer') THEN outcome ELSE 'completed' END,
    settled_at = CASE WHEN kind IN ('message', 'answer') THEN settled_at ELSE :now END
WHERE session_id = :session_id
    AND delivery_id = ANY(CAST(:delivery_ids AS text[]))
    AND refused IS NULL
    AND (turn IS NULL OR turn = :turn)
RETURNING delivery_id, edits
