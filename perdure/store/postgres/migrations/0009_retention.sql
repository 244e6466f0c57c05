-- How many turns have lost their deltas and their messages to retention; and whether the records are gone.
ALTER TABLE sessions ADD COLUMN expired_deltas bigint NOT NULL DEFAULT 0;

ALTER TABLE sessions ADD COLUMN expired_messages bigint NOT NULL DEFAULT 0;

ALTER TABLE sessions ADD COLUMN expired_records bigint NOT NULL DEFAULT 0;
