SELECT agent, lane_settings FROM sessions WHERE session_id = :session_id
