-- The callback that a session delivers when it has ended. Its token is a secret: the text goes when it is settled.
-- `due_at`: when it is tried next; NULL before the session has ended, and after it is settled.
CREATE TABLE callbacks (
    session_id TEXT PRIMARY KEY,
    callback TEXT,
    ended_at TEXT,
    due_at TEXT,
    tries INTEGER NOT NULL DEFAULT 0,
    settled TEXT
) WITHOUT ROWID;

CREATE INDEX callbacks_due ON callbacks (due_at, session_id) WHERE due_at IS NOT NULL;

-- The calls of sessions that agents on other servers do. `token_hash`: of the token with which the other server may
-- report the end, once. `ended_at`: a report was accepted, and no other one is.
CREATE TABLE remote_calls (
    session_id TEXT NOT NULL,
    action TEXT NOT NULL,
    token_hash TEXT,
    state TEXT NOT NULL,
    begun_at TEXT NOT NULL,
    ended_at TEXT,
    PRIMARY KEY (session_id, action)
) WITHOUT ROWID;

CREATE UNIQUE INDEX remote_calls_by_token ON remote_calls (token_hash) WHERE token_hash IS NOT NULL;
