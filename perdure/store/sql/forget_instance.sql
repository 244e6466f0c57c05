UPDATE instances SET session_id = NULL WHERE session_id = :session_id
