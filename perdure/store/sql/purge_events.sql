-- The last ones first: a reader in the middle of the log finds its end, and never a gap.
DELETE FROM events
WHERE session_id = :session_id
    AND idx IN (SELECT idx FROM events WHERE session_id = :session_id ORDER BY idx DESC LIMIT :limit)
RETURNING idx
