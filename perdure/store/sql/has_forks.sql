-- A fork that was deleted, but has forks itself, still keeps its source.
SELECT stream_id FROM streams WHERE forked_from = :stream_id AND path IS NOT NULL LIMIT 1
