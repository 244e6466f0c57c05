CREATE TABLE inputs (
    request_id text COLLATE "C" PRIMARY KEY,
    session_id text COLLATE "C" NOT NULL,
    agent text COLLATE "C" NOT NULL,
    kind text NOT NULL,
    status text NOT NULL,
    requester text NOT NULL,
    request text NOT NULL,
    votes text NOT NULL DEFAULT '[]',
    answer text,
    delivery_id text,
    opened_at text COLLATE "C" NOT NULL,
    closed_at text
);

CREATE INDEX inputs_by_age ON inputs (opened_at, request_id);

CREATE INDEX inputs_by_session ON inputs (session_id, opened_at, request_id);

-- What people work through: closed requests pile up for ever, open ones stay few.
CREATE INDEX inputs_open ON inputs (opened_at, request_id) WHERE status = 'open';

-- A constant default and another collation change the catalogue only: the table is not written anew.
ALTER TABLE deliveries ADD COLUMN kind text NOT NULL DEFAULT 'message';

ALTER TABLE deliveries ALTER COLUMN accepted_at TYPE text COLLATE "C";

CREATE INDEX deliveries_unheard ON deliveries (kind, accepted_at) WHERE turn IS NULL AND refused IS NULL;
