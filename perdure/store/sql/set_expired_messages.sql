-- The title is the beginning of the first message. An imported session is younger than its turns.
UPDATE sessions
SET expired_messages = :turns, title = CASE WHEN created_at < :oldest THEN NULL ELSE title END
WHERE session_id = :session_id
