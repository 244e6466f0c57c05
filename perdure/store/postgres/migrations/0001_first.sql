-- COLLATE "C": names sort by their bytes, as in the other store. Bodies are text, not jsonb: they come back as they were.

CREATE TABLE perdure_schema (
    application text NOT NULL,
    version bigint NOT NULL
);

INSERT INTO perdure_schema (application, version) VALUES ('perdure', 0);

CREATE TABLE sessions (
    session_id text COLLATE "C" PRIMARY KEY,
    agent text COLLATE "C" NOT NULL,
    mode text NOT NULL,
    status text NOT NULL,
    owner text COLLATE "C" NOT NULL,
    principal text NOT NULL,
    capabilities text NOT NULL,
    parent text,
    title text,
    turns bigint NOT NULL DEFAULT 0,
    steps bigint NOT NULL DEFAULT 0,
    tool_calls bigint NOT NULL DEFAULT 0,
    input_tokens bigint NOT NULL DEFAULT 0,
    output_tokens bigint NOT NULL DEFAULT 0,
    cache_read_tokens bigint NOT NULL DEFAULT 0,
    cache_write_tokens bigint NOT NULL DEFAULT 0,
    next_index bigint NOT NULL DEFAULT 0,
    error text,
    created_at text COLLATE "C" NOT NULL,
    updated_at text NOT NULL,
    closed_at text
) WITH (fillfactor = 70);

CREATE INDEX sessions_by_age ON sessions (created_at, session_id);

CREATE INDEX sessions_by_owner ON sessions (owner, created_at, session_id);

CREATE TABLE routes (
    token_hash text COLLATE "C" PRIMARY KEY,
    session_id text COLLATE "C" NOT NULL
);

CREATE INDEX routes_by_session ON routes (session_id);

CREATE TABLE deliveries (
    session_id text COLLATE "C" NOT NULL,
    delivery_id text COLLATE "C" NOT NULL,
    owner text COLLATE "C" NOT NULL,
    idempotency_key text COLLATE "C",
    digest text,
    body text,
    turn bigint,
    refused text,
    accepted_at text NOT NULL,
    PRIMARY KEY (session_id, delivery_id)
);

CREATE UNIQUE INDEX deliveries_by_key ON deliveries (owner, idempotency_key) WHERE idempotency_key IS NOT NULL;

CREATE TABLE records (
    session_id text COLLATE "C" NOT NULL,
    turn bigint NOT NULL,
    step bigint NOT NULL,
    slot text COLLATE "C" NOT NULL,
    format text NOT NULL,
    body text NOT NULL,
    attempt bigint,
    at text NOT NULL,
    PRIMARY KEY (session_id, turn, step, slot)
);

CREATE TABLE events (
    session_id text COLLATE "C" NOT NULL,
    idx bigint NOT NULL,
    key text COLLATE "C" NOT NULL,
    type text NOT NULL,
    turn bigint,
    step bigint,
    attempt bigint,
    data text,
    delivery_ids text,
    at text NOT NULL,
    PRIMARY KEY (session_id, idx),
    UNIQUE (session_id, key)
);

CREATE TABLE fences (
    session_id text COLLATE "C" NOT NULL,
    turn bigint NOT NULL,
    step bigint NOT NULL,
    scope text COLLATE "C" NOT NULL,
    attempt bigint NOT NULL,
    generation bigint NOT NULL,
    PRIMARY KEY (session_id, turn, step, scope)
);

CREATE TABLE slots (
    session_id text COLLATE "C" NOT NULL,
    name text COLLATE "C" NOT NULL,
    value text NOT NULL,
    version bigint NOT NULL,
    PRIMARY KEY (session_id, name)
);
