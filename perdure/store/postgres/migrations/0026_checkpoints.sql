-- Checkpoints of sessions, tags of sessions as `{"name":"text"}`, and notes for the model of the next turn.
CREATE TABLE checkpoints (
    session_id text COLLATE "C" NOT NULL,
    number bigint NOT NULL,
    checkpoint_id text COLLATE "C" NOT NULL,
    name text,
    plan_step bigint,
    turn bigint NOT NULL,
    step bigint NOT NULL,
    taken_at text COLLATE "C" NOT NULL,
    snapshot text NOT NULL,
    size bigint NOT NULL,
    PRIMARY KEY (session_id, number)
);

CREATE UNIQUE INDEX checkpoints_by_id ON checkpoints (session_id, checkpoint_id);

ALTER TABLE sessions ADD COLUMN tags text;

ALTER TABLE sessions ADD COLUMN notes text;
