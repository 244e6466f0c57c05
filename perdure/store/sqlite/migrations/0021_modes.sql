-- How a delivery waits: its lane, what its message does to a busy session (NULL: an older build has accepted it), and its
-- place among those that wait, if it was moved: it sorts with their `accepted_at`. The turn that has settled it.
ALTER TABLE deliveries ADD COLUMN lane TEXT NOT NULL DEFAULT 'main';

ALTER TABLE deliveries ADD COLUMN mode TEXT;

ALTER TABLE deliveries ADD COLUMN position TEXT;

ALTER TABLE deliveries ADD COLUMN answered_by_turn INTEGER;
