SELECT session_id, turn, agent, code, message, failed_at, requeued_at, dead_letter_id
FROM dead_letters
WHERE owner = :owner
    AND (failed_at, dead_letter_id) < (:failed_at, :dead_letter_id)
    AND CASE WHEN requeued_at IS NULL THEN 'open' ELSE 'requeued' END = :status
    AND (CAST(:agent AS text) IS NULL OR agent = :agent)
ORDER BY failed_at DESC, dead_letter_id DESC
LIMIT :limit
