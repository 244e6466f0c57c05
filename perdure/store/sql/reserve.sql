UPDATE fences
SET account = :account,
    reserved_tokens = :tokens,
    reserved_cost = :cost
WHERE session_id = :session_id AND turn = :turn AND step = :step AND scope = :scope
