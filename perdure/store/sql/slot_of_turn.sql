SELECT since, version FROM slot_versions WHERE session_id = :session_id AND name = :name AND turn = :turn
