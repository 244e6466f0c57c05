-- Both at once, and in the order of every writer: otherwise they and this migration would wait for one another.
LOCK TABLE sessions, deliveries IN ACCESS EXCLUSIVE MODE;

-- What Temporal is told of a delivery (`DeliveryRef` as JSON), so that anybody can tell it again.
ALTER TABLE deliveries ADD COLUMN ref text;

DROP INDEX deliveries_unheard;

CREATE INDEX deliveries_unheard ON deliveries (accepted_at, session_id, delivery_id) WHERE turn IS NULL AND refused IS NULL;

CREATE INDEX deliveries_waiting ON deliveries (session_id, accepted_at, delivery_id) WHERE turn IS NULL AND refused IS NULL;

-- The turn that somebody wants stopped; NULL again once that turn has ended.
ALTER TABLE sessions ADD COLUMN cancel_turn bigint;

-- Why the session cannot go on by itself (JSON); NULL while it can.
ALTER TABLE sessions ADD COLUMN attention text;

-- 1: Temporal may not know of everything that was accepted.
ALTER TABLE sessions ADD COLUMN untold bigint NOT NULL DEFAULT 0;

CREATE INDEX sessions_by_status ON sessions (status, created_at, session_id);

CREATE INDEX sessions_by_owner_status ON sessions (owner, status, created_at, session_id);

CREATE INDEX sessions_in_need ON sessions (created_at, session_id) WHERE attention IS NOT NULL;

CREATE INDEX sessions_by_owner_in_need ON sessions (owner, created_at, session_id) WHERE attention IS NOT NULL;

CREATE INDEX sessions_to_cancel ON sessions (session_id) WHERE cancel_turn IS NOT NULL;

CREATE INDEX sessions_untold ON sessions (session_id) WHERE untold <> 0;

CREATE INDEX sessions_open ON sessions (session_id) WHERE closed_at IS NULL;

-- The lowest schema version that code must know to work with this schema.
ALTER TABLE perdure_schema ADD COLUMN compatible bigint NOT NULL DEFAULT 3;

-- Of sessions that are over nobody reads a delivery any more; from now on their last commit says so.
UPDATE deliveries
SET refused = 'session_not_active',
    body = NULL
WHERE turn IS NULL
    AND refused IS NULL
    AND session_id IN (SELECT session_id FROM sessions WHERE closed_at IS NOT NULL);
