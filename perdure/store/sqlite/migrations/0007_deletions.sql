-- What is left of a deleted session: who may ask about it (a hash), and what was deleted.
CREATE TABLE deletions (
    session_id TEXT PRIMARY KEY,
    owner_hash TEXT NOT NULL,
    requested_at TEXT NOT NULL,
    finished_at TEXT,
    counts TEXT NOT NULL
) WITHOUT ROWID;

CREATE INDEX deletions_unfinished ON deletions (requested_at, session_id) WHERE finished_at IS NULL;

CREATE INDEX deletions_finished ON deletions (finished_at, session_id) WHERE finished_at IS NOT NULL;

-- Hashes of the idempotency keys of deleted sessions: a late retry must not start the session again.
CREATE TABLE deleted_keys (
    key_hash TEXT PRIMARY KEY,
    session_id TEXT NOT NULL
) WITHOUT ROWID;

CREATE INDEX deleted_keys_by_session ON deleted_keys (session_id);
