-- The sessions behind a name that a caller has chosen, in the order in which they came: each continues the stream of
-- the one before. `session_id`: NULL when the last of them was deleted; its number must not come again.
CREATE TABLE instances (
    token_hash text COLLATE "C" NOT NULL,
    number bigint NOT NULL,
    session_id text COLLATE "C",
    PRIMARY KEY (token_hash, number)
);

CREATE UNIQUE INDEX instances_by_session ON instances (session_id) WHERE session_id IS NOT NULL;

-- What a stream has: the bytes of its items, and some for each of them, which count towards the room of its owner.
ALTER TABLE streams ADD COLUMN bytes bigint NOT NULL DEFAULT 0;

UPDATE streams
SET bytes = COALESCE(
    (SELECT SUM(size) + 100 * COUNT(*) FROM stream_items WHERE stream_items.stream_id = streams.stream_id), 0
);
