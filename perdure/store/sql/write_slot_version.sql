INSERT INTO slot_versions (session_id, name, turn, since, version, value)
VALUES (:session_id, :name, :turn, :version, :version, :value)
ON CONFLICT (session_id, name, turn) DO UPDATE
SET value = excluded.value,
    version = excluded.version
