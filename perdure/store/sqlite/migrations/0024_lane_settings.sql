-- What was set for the lanes of a session, in place of what its agent declares: `{lane: {mode, cap, overflow}}` as JSON.
ALTER TABLE sessions ADD COLUMN lane_settings TEXT;
