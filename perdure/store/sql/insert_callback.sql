INSERT INTO callbacks (session_id, callback)
VALUES (:session_id, :callback)
