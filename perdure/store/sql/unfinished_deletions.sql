-- Who finishes a deletion finishes its parts, unless that was older code, which knew of no parts.
SELECT session_id
FROM deletions
WHERE finished_at IS NULL
    AND NOT EXISTS (
        SELECT 1 FROM deletions AS whole WHERE whole.session_id = deletions.part_of AND whole.finished_at IS NULL
    )
ORDER BY requested_at, session_id
LIMIT :limit
