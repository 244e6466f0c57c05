-- Streams that callers write. `path`: NULL once the stream is deleted and no fork of it is left; then it can be used
-- again, and a sweep deletes the items and the row. `request`: what was asked for, to recognise a repetition.
-- `version`: changes with everything that readers wait for. `deleted_at`: it is closed to everybody.
CREATE TABLE streams (
    stream_id text COLLATE "C" PRIMARY KEY,
    owner text COLLATE "C" NOT NULL,
    path text COLLATE "C",
    content_type text NOT NULL,
    request text NOT NULL,
    next_index bigint NOT NULL DEFAULT 0,
    version bigint NOT NULL DEFAULT 0,
    closed bigint NOT NULL DEFAULT 0,
    closed_by text,
    last_sequence text COLLATE "C",
    ttl bigint,
    expires_at text COLLATE "C",
    due_at text COLLATE "C",
    forked_from text COLLATE "C",
    created_at text COLLATE "C" NOT NULL,
    deleted_at text COLLATE "C"
) WITH (fillfactor = 70);

CREATE UNIQUE INDEX streams_by_path ON streams (owner, path) WHERE path IS NOT NULL;

CREATE INDEX streams_by_source ON streams (forked_from) WHERE forked_from IS NOT NULL;

CREATE INDEX streams_due ON streams (due_at) WHERE due_at IS NOT NULL;

CREATE INDEX streams_deleted ON streams (deleted_at) WHERE deleted_at IS NOT NULL;

-- `batch`: the position of the first item of the same append.
CREATE TABLE stream_items (
    stream_id text COLLATE "C" NOT NULL,
    idx bigint NOT NULL,
    batch bigint NOT NULL,
    size bigint NOT NULL,
    data bytea NOT NULL,
    PRIMARY KEY (stream_id, idx)
);

CREATE TABLE stream_producers (
    stream_id text COLLATE "C" NOT NULL,
    producer_id text COLLATE "C" NOT NULL,
    epoch bigint NOT NULL,
    seq bigint NOT NULL,
    PRIMARY KEY (stream_id, producer_id)
);
