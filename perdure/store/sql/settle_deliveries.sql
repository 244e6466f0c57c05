-- Also those of earlier turns: they have waited for people, and this turn has gone on with them.
UPDATE deliveries
SET outcome = :outcome,
    settled_at = :now,
    error = :error,
    answered_by_turn = :answered_by
WHERE session_id = :session_id
    AND outcome IS NULL
    AND started_at IS NOT NULL
    AND turn <= :turn
RETURNING delivery_id, turn, accepted_at
