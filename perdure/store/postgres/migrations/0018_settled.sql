-- What became of a delivery, and when a turn has read it. Rows of older builds have no `started_at`: their end is only in
-- the events. `edits`: how often its content was changed.
ALTER TABLE deliveries ADD COLUMN started_at TEXT;

ALTER TABLE deliveries ADD COLUMN settled_at TEXT;

ALTER TABLE deliveries ADD COLUMN outcome TEXT;

ALTER TABLE deliveries ADD COLUMN error TEXT;

ALTER TABLE deliveries ADD COLUMN edits INTEGER NOT NULL DEFAULT 0;

CREATE INDEX deliveries_by_id ON deliveries (delivery_id);

CREATE INDEX deliveries_of_session ON deliveries (session_id, accepted_at, delivery_id);

CREATE INDEX deliveries_unsettled ON deliveries (session_id) WHERE outcome IS NULL AND started_at IS NOT NULL;
