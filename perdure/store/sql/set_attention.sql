UPDATE sessions SET attention = :attention WHERE session_id = :session_id
