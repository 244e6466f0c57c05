-- Those whose deletion is not yet a part of this one.
SELECT sessions.session_id
FROM sessions
LEFT JOIN deletions ON deletions.session_id = sessions.session_id
WHERE sessions.parent_id = :session_id AND deletions.part_of IS NULL
ORDER BY sessions.session_id
LIMIT :limit
