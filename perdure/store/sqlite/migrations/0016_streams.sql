-- Streams that callers write. `path`: NULL once the stream is deleted and no fork of it is left; then it can be used
-- again, and a sweep deletes the items and the row. `request`: what was asked for, to recognise a repetition.
-- `version`: changes with everything that readers wait for. `deleted_at`: it is closed to everybody.
CREATE TABLE streams (
    stream_id TEXT PRIMARY KEY,
    owner TEXT NOT NULL,
    path TEXT,
    content_type TEXT NOT NULL,
    request TEXT NOT NULL,
    next_index INTEGER NOT NULL DEFAULT 0,
    version INTEGER NOT NULL DEFAULT 0,
    closed INTEGER NOT NULL DEFAULT 0,
    closed_by TEXT,
    last_sequence TEXT,
    ttl INTEGER,
    expires_at TEXT,
    due_at TEXT,
    forked_from TEXT,
    created_at TEXT NOT NULL,
    deleted_at TEXT
) WITHOUT ROWID;

CREATE UNIQUE INDEX streams_by_path ON streams (owner, path) WHERE path IS NOT NULL;

CREATE INDEX streams_by_source ON streams (forked_from) WHERE forked_from IS NOT NULL;

CREATE INDEX streams_due ON streams (due_at) WHERE due_at IS NOT NULL;

CREATE INDEX streams_deleted ON streams (deleted_at) WHERE deleted_at IS NOT NULL;

-- `batch`: the position of the first item of the same append.
CREATE TABLE stream_items (
    stream_id TEXT NOT NULL,
    idx INTEGER NOT NULL,
    batch INTEGER NOT NULL,
    size INTEGER NOT NULL,
    data BLOB NOT NULL,
    PRIMARY KEY (stream_id, idx)
);

CREATE TABLE stream_producers (
    stream_id TEXT NOT NULL,
    producer_id TEXT NOT NULL,
    epoch INTEGER NOT NULL,
    seq INTEGER NOT NULL,
    PRIMARY KEY (stream_id, producer_id)
) WITHOUT ROWID;
