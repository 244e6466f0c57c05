-- The place in its parent at which a fork was requested, as it was requested.
ALTER TABLE sessions ADD COLUMN fork_place text;

-- The value of a slot at the end of each step that has written it. `since`: the version of the step's first write.
CREATE TABLE slot_steps (
    session_id text COLLATE "C" NOT NULL,
    name text COLLATE "C" NOT NULL,
    turn bigint NOT NULL,
    step bigint NOT NULL,
    since bigint NOT NULL,
    version bigint NOT NULL,
    value text NOT NULL,
    PRIMARY KEY (session_id, name, turn, step)
);
