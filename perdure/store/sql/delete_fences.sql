DELETE FROM fences WHERE session_id = :session_id
