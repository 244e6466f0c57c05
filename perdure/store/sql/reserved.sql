-- By other attempts than those at this place.
SELECT
    CAST(coalesce(sum(reserved_tokens), 0) AS bigint) AS tokens,
    CAST(coalesce(sum(reserved_cost), 0) AS bigint) AS cost
FROM fences
WHERE account = :account
    AND NOT (session_id = :session_id AND turn = :turn AND step = :step AND scope = :scope)
