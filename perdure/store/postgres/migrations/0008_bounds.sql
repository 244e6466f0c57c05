-- What bounds the session in time (JSON); NULL: nothing.
ALTER TABLE sessions ADD COLUMN bounds text;
