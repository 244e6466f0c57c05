-- What has ended stays as it has ended. What it has used is added also later.
UPDATE attempts
SET status = CASE WHEN status = 'running' THEN coalesce(CAST(:status AS text), status) ELSE status END,
    ended_at = CASE WHEN status = 'running' AND CAST(:status AS text) IS NOT NULL THEN :now ELSE ended_at END,
    error = CASE WHEN status = 'running' THEN CAST(:error AS text) ELSE error END,
    input_tokens = input_tokens + :input_tokens,
    output_tokens = output_tokens + :output_tokens,
    cache_read_tokens = cache_read_tokens + :cache_read_tokens,
    cache_write_tokens = cache_write_tokens + :cache_write_tokens,
    cost = cost + :cost
WHERE session_id = :session_id
    AND turn = :turn
    AND step = :step
    AND scope = :scope
    AND generation = :generation
