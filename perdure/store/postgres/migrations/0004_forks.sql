-- A fork shares its first turns with the session that it was forked from: it has no records of these turns itself.
ALTER TABLE sessions ADD COLUMN forked_from text COLLATE "C";

ALTER TABLE sessions ADD COLUMN forked_turns bigint NOT NULL DEFAULT 0;

CREATE INDEX sessions_forked ON sessions (forked_from) WHERE forked_from IS NOT NULL;

-- The value of a slot at the end of each turn that has written it. `since`: the version of the turn's first write.
CREATE TABLE slot_versions (
    session_id text COLLATE "C" NOT NULL,
    name text COLLATE "C" NOT NULL,
    turn bigint NOT NULL,
    since bigint NOT NULL,
    version bigint NOT NULL,
    value text NOT NULL,
    PRIMARY KEY (session_id, name, turn)
);
