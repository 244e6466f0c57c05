-- A fork shares its first turns with the session that it was forked from: it has no records of these turns itself.
ALTER TABLE sessions ADD COLUMN forked_from TEXT;

ALTER TABLE sessions ADD COLUMN forked_turns INTEGER NOT NULL DEFAULT 0;

CREATE INDEX sessions_forked ON sessions (forked_from) WHERE forked_from IS NOT NULL;

-- The value of a slot at the end of each turn that has written it. `since`: the version of the turn's first write.
CREATE TABLE slot_versions (
    session_id TEXT NOT NULL,
    name TEXT NOT NULL,
    turn INTEGER NOT NULL,
    since INTEGER NOT NULL,
    version INTEGER NOT NULL,
    value TEXT NOT NULL,
    PRIMARY KEY (session_id, name, turn)
) WITHOUT ROWID;
