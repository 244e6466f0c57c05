UPDATE sessions SET lane_settings = :settings WHERE session_id = :session_id
