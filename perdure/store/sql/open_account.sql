INSERT INTO spending (account, tokens, cost)
VALUES (:account, 0, 0)
ON CONFLICT DO NOTHING
