-- The receipts of deliveries outlive their sessions: what was accepted, when, and the digest of the request.
ALTER TABLE deleted_keys ADD COLUMN delivery_id TEXT;

ALTER TABLE deleted_keys ADD COLUMN accepted_at TEXT;

ALTER TABLE deleted_keys ADD COLUMN digest TEXT;
