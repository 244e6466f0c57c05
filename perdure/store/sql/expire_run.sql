UPDATE runs
SET input = NULL,
    result = NULL
WHERE session_id = :session_id
