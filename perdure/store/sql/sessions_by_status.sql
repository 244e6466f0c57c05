SELECT
    session_id, agent, mode, status, principal, capabilities, parent, title, turns, steps, tool_calls, input_tokens,
    output_tokens, cache_read_tokens, cache_write_tokens, next_index, error, cancel_turn, attention, untold,
    forked_from, forked_turns, fork_place, left_out, tags, notes, bounds, expired_records, steered, below_input_tokens,
    below_output_tokens, below_cache_read_tokens, below_cache_write_tokens, below_cost, below_tokens_before,
    below_cost_before, run,
    lane, parent_id, cancel_meant, created_at, updated_at, closed_at
FROM sessions
WHERE status = :status
    AND attention IS NULL
    AND (created_at, session_id) < (:created_at, :session_id)
    AND (CAST(:agent AS text) IS NULL OR agent = :agent)
    AND (CAST(:mode AS text) IS NULL OR mode = :mode)
    AND run IS NULL
    AND (lane IS NULL OR lane = 'main')
    AND (CAST(:tag AS text) IS NULL OR REPLACE(tags, CAST(:tag AS text), '') <> tags)
ORDER BY created_at DESC, session_id DESC
LIMIT :limit
