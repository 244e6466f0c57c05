SELECT
    session_id, agent, mode, status, principal, capabilities, parent, title, turns, steps, tool_calls, input_tokens,
    output_tokens, cache_read_tokens, cache_write_tokens, next_index, error, cancel_turn, attention, untold,
    forked_from, forked_turns, fork_place, left_out, tags, notes, bounds, expired_records, steered, below_input_tokens,
    below_output_tokens, below_cache_read_tokens, below_cache_write_tokens, below_cost, below_tokens_before,
    below_cost_before, run,
    lane, parent_id, cancel_meant, created_at, updated_at, closed_at
FROM sessions
WHERE session_id = :session_id
FOR UPDATE
