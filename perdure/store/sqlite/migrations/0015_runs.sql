-- The name of the run whose row this is; NULL: a session.
ALTER TABLE sessions ADD COLUMN run TEXT;

-- What callers read of runs. `input`, `result` and `error` are JSON; `waiting_for`: what a run waits for that is parked.
CREATE TABLE runs (
    session_id TEXT PRIMARY KEY,
    workflow_name TEXT NOT NULL,
    owner TEXT NOT NULL,
    status TEXT NOT NULL,
    started_at TEXT NOT NULL,
    ended_at TEXT,
    duration_ms INTEGER,
    input TEXT,
    result TEXT,
    error TEXT,
    trace_carrier TEXT,
    waiting_for TEXT,
    attempts INTEGER NOT NULL DEFAULT 0
);

CREATE INDEX runs_by_name ON runs (workflow_name, started_at, session_id);

CREATE INDEX runs_by_status ON runs (status, started_at, session_id);

CREATE INDEX runs_by_owner ON runs (owner, started_at, session_id);

CREATE INDEX runs_by_age ON runs (started_at, session_id);
