-- The receipts of deliveries outlive their sessions: what was accepted, when, and the digest of the request.
ALTER TABLE deleted_keys ADD COLUMN delivery_id text COLLATE "C";

ALTER TABLE deleted_keys ADD COLUMN accepted_at text COLLATE "C";

ALTER TABLE deleted_keys ADD COLUMN digest text COLLATE "C";
