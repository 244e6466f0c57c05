INSERT INTO slot_steps (session_id, name, turn, step, since, version, value)
VALUES (:session_id, :name, :turn, :step, :version, :version, :value)
ON CONFLICT (session_id, name, turn, step) DO UPDATE
SET value = excluded.value,
    version = excluded.version
