-- What is left of a deleted session: who may ask about it (a hash), and what was deleted.
CREATE TABLE deletions (
    session_id text COLLATE "C" PRIMARY KEY,
    owner_hash text COLLATE "C" NOT NULL,
    requested_at text COLLATE "C" NOT NULL,
    finished_at text COLLATE "C",
    counts text NOT NULL
);

CREATE INDEX deletions_unfinished ON deletions (requested_at, session_id) WHERE finished_at IS NULL;

CREATE INDEX deletions_finished ON deletions (finished_at, session_id) WHERE finished_at IS NOT NULL;

-- Hashes of the idempotency keys of deleted sessions: a late retry must not start the session again.
CREATE TABLE deleted_keys (
    key_hash text COLLATE "C" PRIMARY KEY,
    session_id text COLLATE "C" NOT NULL
);

CREATE INDEX deleted_keys_by_session ON deleted_keys (session_id);
