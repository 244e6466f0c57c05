-- The name of the run whose row this is; NULL: a session.
ALTER TABLE sessions ADD COLUMN run text COLLATE "C";

-- What callers read of runs. `input`, `result` and `error` are JSON; `waiting_for`: what a run waits for that is parked.
CREATE TABLE runs (
    session_id text COLLATE "C" PRIMARY KEY,
    workflow_name text COLLATE "C" NOT NULL,
    owner text COLLATE "C" NOT NULL,
    status text COLLATE "C" NOT NULL,
    started_at text COLLATE "C" NOT NULL,
    ended_at text,
    duration_ms bigint,
    input text,
    result text,
    error text,
    trace_carrier text,
    waiting_for text,
    attempts bigint NOT NULL DEFAULT 0
);

CREATE INDEX runs_by_name ON runs (workflow_name, started_at, session_id);

CREATE INDEX runs_by_status ON runs (status, started_at, session_id);

CREATE INDEX runs_by_owner ON runs (owner, started_at, session_id);

CREATE INDEX runs_by_age ON runs (started_at, session_id);
