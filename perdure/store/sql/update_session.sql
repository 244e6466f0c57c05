UPDATE sessions
SET status = :status,
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
