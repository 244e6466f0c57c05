-- 1: a message may wait that is to enter the running turn. So turns without one need not look for it.
ALTER TABLE sessions ADD COLUMN steered INTEGER NOT NULL DEFAULT 0;
