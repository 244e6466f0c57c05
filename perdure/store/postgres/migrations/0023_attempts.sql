-- What is reported of attempts; the fences decide. `number`: in the order in which they began. An attempt that has not
-- ended is running as long as its generation holds the fence: code before this schema ends attempts without a word here.
CREATE TABLE attempts (
    session_id text COLLATE "C" NOT NULL,
    turn bigint NOT NULL,
    step bigint NOT NULL,
    scope text COLLATE "C" NOT NULL,
    number bigint NOT NULL,
    attempt_id text COLLATE "C" NOT NULL,
    generation bigint NOT NULL,
    worker text COLLATE "C" NOT NULL,
    started_at text COLLATE "C" NOT NULL,
    lease_expires_at text COLLATE "C" NOT NULL,
    ended_at text COLLATE "C",
    status text COLLATE "C" NOT NULL,
    error text,
    input_tokens bigint NOT NULL DEFAULT 0,
    output_tokens bigint NOT NULL DEFAULT 0,
    cache_read_tokens bigint NOT NULL DEFAULT 0,
    cache_write_tokens bigint NOT NULL DEFAULT 0,
    cost bigint NOT NULL DEFAULT 0,
    PRIMARY KEY (session_id, turn, step, scope, number)
);

CREATE INDEX attempts_running ON attempts (session_id, turn) WHERE status = 'running';

CREATE INDEX attempts_by_age ON attempts (started_at);
