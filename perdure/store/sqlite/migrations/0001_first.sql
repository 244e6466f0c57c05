-- WITHOUT ROWID: small rows that are always found by their key.

CREATE TABLE perdure_schema (
    application TEXT NOT NULL,
    version INTEGER NOT NULL
);

INSERT INTO perdure_schema (application, version) VALUES ('perdure', 0);

CREATE TABLE sessions (
    session_id TEXT PRIMARY KEY,
    agent TEXT NOT NULL,
    mode TEXT NOT NULL,
    status TEXT NOT NULL,
    owner TEXT NOT NULL,
    principal TEXT NOT NULL,
    capabilities TEXT NOT NULL,
    parent TEXT,
    title TEXT,
    turns INTEGER NOT NULL DEFAULT 0,
    steps INTEGER NOT NULL DEFAULT 0,
    tool_calls INTEGER NOT NULL DEFAULT 0,
    input_tokens INTEGER NOT NULL DEFAULT 0,
    output_tokens INTEGER NOT NULL DEFAULT 0,
    cache_read_tokens INTEGER NOT NULL DEFAULT 0,
    cache_write_tokens INTEGER NOT NULL DEFAULT 0,
    next_index INTEGER NOT NULL DEFAULT 0,
    error TEXT,
    created_at TEXT NOT NULL,
    updated_at TEXT NOT NULL,
    closed_at TEXT
);

CREATE INDEX sessions_by_age ON sessions (created_at, session_id);

CREATE INDEX sessions_by_owner ON sessions (owner, created_at, session_id);

CREATE TABLE routes (
    token_hash TEXT PRIMARY KEY,
    session_id TEXT NOT NULL
) WITHOUT ROWID;

CREATE INDEX routes_by_session ON routes (session_id);

CREATE TABLE deliveries (
    session_id TEXT NOT NULL,
    delivery_id TEXT NOT NULL,
    owner TEXT NOT NULL,
    idempotency_key TEXT,
    digest TEXT,
    body TEXT,
    turn INTEGER,
    refused TEXT,
    accepted_at TEXT NOT NULL,
    PRIMARY KEY (session_id, delivery_id)
);

CREATE UNIQUE INDEX deliveries_by_key ON deliveries (owner, idempotency_key) WHERE idempotency_key IS NOT NULL;

CREATE TABLE records (
    session_id TEXT NOT NULL,
    turn INTEGER NOT NULL,
    step INTEGER NOT NULL,
    slot TEXT NOT NULL,
    format TEXT NOT NULL,
    body TEXT NOT NULL,
    attempt INTEGER,
    at TEXT NOT NULL,
    PRIMARY KEY (session_id, turn, step, slot)
);

CREATE TABLE events (
    session_id TEXT NOT NULL,
    idx INTEGER NOT NULL,
    key TEXT NOT NULL,
    type TEXT NOT NULL,
    turn INTEGER,
    step INTEGER,
    attempt INTEGER,
    data TEXT,
    delivery_ids TEXT,
    at TEXT NOT NULL,
    PRIMARY KEY (session_id, idx),
    UNIQUE (session_id, key)
) WITHOUT ROWID;

CREATE TABLE fences (
    session_id TEXT NOT NULL,
    turn INTEGER NOT NULL,
    step INTEGER NOT NULL,
    scope TEXT NOT NULL,
    attempt INTEGER NOT NULL,
    generation INTEGER NOT NULL,
    PRIMARY KEY (session_id, turn, step, scope)
) WITHOUT ROWID;

CREATE TABLE slots (
    session_id TEXT NOT NULL,
    name TEXT NOT NULL,
    value TEXT NOT NULL,
    version INTEGER NOT NULL,
    PRIMARY KEY (session_id, name)
);
