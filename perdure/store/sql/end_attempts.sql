-- Also those of earlier turns: code before this schema ends turns and leaves their attempts as they are.
UPDATE attempts
SET status = CASE WHEN CAST(:cancelled AS bigint) = 0 AND lease_expires_at < :now THEN 'timed_out' ELSE 'cancelled' END,
    ended_at = :now,
    error = CASE
        WHEN CAST(:cancelled AS bigint) = 0 AND lease_expires_at < :now THEN CAST(:expired AS text)
        ELSE CAST(:ended AS text)
    END
WHERE session_id = :session_id AND turn <= :turn AND status = 'running'
