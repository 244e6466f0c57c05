DELETE FROM slot_versions
WHERE session_id = :session_id
    AND (name, turn) IN (SELECT name, turn FROM slot_versions WHERE session_id = :session_id LIMIT :limit)
RETURNING name
