UPDATE sessions
SET status = :status,
    below_tokens_before = CASE
        WHEN turns < :turns THEN below_input_tokens + below_output_tokens ELSE below_tokens_before
    END,
    below_cost_before = CASE WHEN turns < :turns THEN below_cost ELSE below_cost_before END,
    turns = :turns,
    steps = :steps,
    tool_calls = :tool_calls,
    input_tokens = :input_tokens,
    output_tokens = :output_tokens,
    cache_read_tokens = :cache_read_tokens,
    cache_write_tokens = :cache_write_tokens,
    next_index = :next_index,
    error = :error,
    cancel_turn = :cancel_turn,
    attention = :attention,
    closed_at = :closed_at,
    updated_at = :now
WHERE session_id = :session_id
