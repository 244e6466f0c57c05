DELETE FROM slot_versions WHERE session_id = :session_id AND name = :name
