-- What the descendants of a session have used: tokens, and billionths of a dollar at the prices of who has spent them.
ALTER TABLE sessions ADD COLUMN below_input_tokens INTEGER NOT NULL DEFAULT 0;

ALTER TABLE sessions ADD COLUMN below_output_tokens INTEGER NOT NULL DEFAULT 0;

ALTER TABLE sessions ADD COLUMN below_cache_read_tokens INTEGER NOT NULL DEFAULT 0;

ALTER TABLE sessions ADD COLUMN below_cache_write_tokens INTEGER NOT NULL DEFAULT 0;

ALTER TABLE sessions ADD COLUMN below_cost INTEGER NOT NULL DEFAULT 0;

-- The tokens and the cost of these when the session's latest turn began.
ALTER TABLE sessions ADD COLUMN below_tokens_before INTEGER NOT NULL DEFAULT 0;

ALTER TABLE sessions ADD COLUMN below_cost_before INTEGER NOT NULL DEFAULT 0;
