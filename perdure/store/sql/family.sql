SELECT
    session_id, agent, mode, status, principal, capabilities, parent, title, turns, steps, tool_calls, input_tokens,
    output_tokens, cache_read_tokens, cache_write_tokens, next_index, error, cancel_turn, attention, untold,
    forked_from, forked_turns, fork_place, left_out, bounds, expired_records, created_at, updated_at, closed_at
FROM sessions
WHERE root_id = :root
    AND (created_at, session_id) > (:created_at, :session_id)
ORDER BY created_at, session_id
LIMIT :limit
