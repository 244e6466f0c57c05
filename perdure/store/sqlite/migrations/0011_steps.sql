-- The place in its parent at which a fork was requested, as it was requested.
ALTER TABLE sessions ADD COLUMN fork_place TEXT;

-- The value of a slot at the end of each step that has written it. `since`: the version of the step's first write.
CREATE TABLE slot_steps (
    session_id TEXT NOT NULL,
    name TEXT NOT NULL,
    turn INTEGER NOT NULL,
    step INTEGER NOT NULL,
    since INTEGER NOT NULL,
    version INTEGER NOT NULL,
    value TEXT NOT NULL,
    PRIMARY KEY (session_id, name, turn, step)
) WITHOUT ROWID;
