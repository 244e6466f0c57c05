CREATE TABLE inputs (
    request_id TEXT PRIMARY KEY,
    session_id TEXT NOT NULL,
    agent TEXT NOT NULL,
    kind TEXT NOT NULL,
    status TEXT NOT NULL,
    requester TEXT NOT NULL,
    request TEXT NOT NULL,
    votes TEXT NOT NULL DEFAULT '[]',
    answer TEXT,
    delivery_id TEXT,
    opened_at TEXT NOT NULL,
    closed_at TEXT
);

CREATE INDEX inputs_by_age ON inputs (opened_at, request_id);

CREATE INDEX inputs_by_session ON inputs (session_id, opened_at, request_id);

-- What people work through: closed requests pile up for ever, open ones stay few.
CREATE INDEX inputs_open ON inputs (opened_at, request_id) WHERE status = 'open';

ALTER TABLE deliveries ADD COLUMN kind TEXT NOT NULL DEFAULT 'message';

CREATE INDEX deliveries_unheard ON deliveries (kind, accepted_at) WHERE turn IS NULL AND refused IS NULL;
