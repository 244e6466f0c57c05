DELETE FROM deleted_keys WHERE session_id = :session_id
