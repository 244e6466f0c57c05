-- What a request to cancel a turn means that had not begun: `{turn, until}` as JSON. `until`: when the newest delivery was
-- accepted that waited then. An older build leaves it as it is; it counts only together with the same `cancel_turn`.
ALTER TABLE sessions ADD COLUMN cancel_meant TEXT;
