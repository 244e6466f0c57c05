-- What has happened to a session in some time is found without a look at the rest.
CREATE INDEX attempts_by_start ON attempts (session_id, started_at);

CREATE INDEX attempts_by_end ON attempts (session_id, ended_at) WHERE ended_at IS NOT NULL;

CREATE INDEX deliveries_by_start ON deliveries (session_id, started_at) WHERE started_at IS NOT NULL;
