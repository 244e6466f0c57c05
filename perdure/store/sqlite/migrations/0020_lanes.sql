-- The lane of a session whose `parent_id` is the session that it is a lane of. `main`: it has other lanes. NULL: neither.
ALTER TABLE sessions ADD COLUMN lane TEXT;
