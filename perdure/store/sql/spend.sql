INSERT INTO spending (account, tokens, cost)
VALUES (:account, :tokens, :cost)
ON CONFLICT (account) DO UPDATE
SET tokens = spending.tokens + excluded.tokens,
    cost = spending.cost + excluded.cost
