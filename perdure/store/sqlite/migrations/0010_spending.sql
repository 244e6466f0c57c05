-- What a principal has spent in a period: tokens, and billionths of a dollar.
CREATE TABLE spending (
    account TEXT PRIMARY KEY,
    tokens INTEGER NOT NULL,
    cost INTEGER NOT NULL
) WITHOUT ROWID;

-- What the attempt that holds the fence has reserved of an account.
ALTER TABLE fences ADD COLUMN account TEXT;

ALTER TABLE fences ADD COLUMN reserved_tokens INTEGER NOT NULL DEFAULT 0;

ALTER TABLE fences ADD COLUMN reserved_cost INTEGER NOT NULL DEFAULT 0;

CREATE INDEX fences_by_account ON fences (account) WHERE account IS NOT NULL;
