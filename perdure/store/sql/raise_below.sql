UPDATE sessions
SET below_input_tokens = below_input_tokens + :input_tokens,
    below_output_tokens = below_output_tokens + :output_tokens,
    below_cache_read_tokens = below_cache_read_tokens + :cache_read_tokens,
    below_cache_write_tokens = below_cache_write_tokens + :cache_write_tokens,
    below_cost = below_cost + :cost
WHERE session_id = :session_id
RETURNING parent_id
