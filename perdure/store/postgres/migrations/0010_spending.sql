-- What a principal has spent in a period: tokens, and billionths of a dollar.
CREATE TABLE spending (
    account text COLLATE "C" PRIMARY KEY,
    tokens bigint NOT NULL,
    cost bigint NOT NULL
);

-- What the attempt that holds the fence has reserved of an account.
ALTER TABLE fences ADD COLUMN account text COLLATE "C";

ALTER TABLE fences ADD COLUMN reserved_tokens bigint NOT NULL DEFAULT 0;

ALTER TABLE fences ADD COLUMN reserved_cost bigint NOT NULL DEFAULT 0;

CREATE INDEX fences_by_account ON fences (account) WHERE account IS NOT NULL;
