INSERT INTO slots (session_id, name, value, version)
VALUES (:session_id, :name, :value, :version)
ON CONFLICT (session_id, name) DO UPDATE
SET value = excluded.value,
    version = excluded.version
