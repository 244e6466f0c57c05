-- The keys of a turn's events begin with its number.
SELECT MAX(at) AS newest FROM events WHERE session_id = :session_id AND key >= :first AND key < :until
