-- One that is not settled yet outlives its session for a day at most: somebody waits for it.
DELETE FROM callbacks
WHERE session_id IN (
    SELECT session_id FROM callbacks WHERE session_id = :session_id AND settled IS NOT NULL LIMIT :limit
)
RETURNING session_id
