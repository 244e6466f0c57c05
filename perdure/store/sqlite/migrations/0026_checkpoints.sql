-- Checkpoints of sessions, tags of sessions as `{"name":"text"}`, and notes for the model of the next turn.
CREATE TABLE checkpoints (
    session_id TEXT NOT NULL,
    number INTEGER NOT NULL,
    checkpoint_id TEXT NOT NULL,
    name TEXT,
    plan_step INTEGER,
    turn INTEGER NOT NULL,
    step INTEGER NOT NULL,
    taken_at TEXT NOT NULL,
    snapshot TEXT NOT NULL,
    size INTEGER NOT NULL,
    PRIMARY KEY (session_id, number)
) WITHOUT ROWID;

CREATE UNIQUE INDEX checkpoints_by_id ON checkpoints (session_id, checkpoint_id);

ALTER TABLE sessions ADD COLUMN tags TEXT;

ALTER TABLE sessions ADD COLUMN notes TEXT;
