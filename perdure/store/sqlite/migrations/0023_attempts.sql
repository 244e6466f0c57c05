-- What is reported of attempts; the fences decide. `number`: in the order in which they began. An attempt that has not
-- ended is running as long as its generation holds the fence: code before this schema ends attempts without a word here.
CREATE TABLE attempts (
    session_id TEXT NOT NULL,
    turn INTEGER NOT NULL,
    step INTEGER NOT NULL,
    scope TEXT NOT NULL,
    number INTEGER NOT NULL,
    attempt_id TEXT NOT NULL,
    generation INTEGER NOT NULL,
    worker TEXT NOT NULL,
    started_at TEXT NOT NULL,
    lease_expires_at TEXT NOT NULL,
    ended_at TEXT,
    status TEXT NOT NULL,
    error TEXT,
    input_tokens INTEGER NOT NULL DEFAULT 0,
    output_tokens INTEGER NOT NULL DEFAULT 0,
    cache_read_tokens INTEGER NOT NULL DEFAULT 0,
    cache_write_tokens INTEGER NOT NULL DEFAULT 0,
    cost INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (session_id, turn, step, scope, number)
) WITHOUT ROWID;

CREATE INDEX attempts_running ON attempts (session_id, turn) WHERE status = 'running';

CREATE INDEX attempts_by_age ON attempts (started_at);
