INSERT INTO dead_letters (dead_letter_id, session_id, turn, owner, agent, code, message, failed_at)
VALUES (:dead_letter_id, :session_id, :turn, :owner, :agent, :code, :message, :now)
ON CONFLICT DO NOTHING
