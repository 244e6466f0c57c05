-- Of a child: the session that has started it, and the session at the top of its family. NULL for a root.
ALTER TABLE sessions ADD COLUMN parent_id text COLLATE "C";

ALTER TABLE sessions ADD COLUMN root_id text COLLATE "C";

CREATE INDEX sessions_by_parent ON sessions (parent_id, created_at, session_id) WHERE parent_id IS NOT NULL;

CREATE INDEX sessions_by_root ON sessions (root_id, created_at, session_id) WHERE root_id IS NOT NULL;

-- The root of the session that asks, so that one query finds what a whole family asks; NULL for a root.
ALTER TABLE inputs ADD COLUMN root_id text COLLATE "C";

CREATE INDEX inputs_by_root ON inputs (root_id, opened_at, request_id) WHERE root_id IS NOT NULL;

-- The deletion of a session includes those of its children; NULL: this one was requested by itself.
ALTER TABLE deletions ADD COLUMN part_of text COLLATE "C";

CREATE INDEX deletions_by_whole ON deletions (part_of, session_id) WHERE part_of IS NOT NULL;
