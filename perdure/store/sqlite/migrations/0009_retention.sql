-- How many turns have lost their deltas and their messages to retention; and whether the records are gone.
ALTER TABLE sessions ADD COLUMN expired_deltas INTEGER NOT NULL DEFAULT 0;

ALTER TABLE sessions ADD COLUMN expired_messages INTEGER NOT NULL DEFAULT 0;

ALTER TABLE sessions ADD COLUMN expired_records INTEGER NOT NULL DEFAULT 0;
