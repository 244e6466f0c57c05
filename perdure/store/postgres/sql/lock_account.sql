SELECT tokens, cost FROM spending WHERE account = :account FOR UPDATE
