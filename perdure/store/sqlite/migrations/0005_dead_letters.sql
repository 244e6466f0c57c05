-- Turns that failed. An operator or the caller may have their messages read again.
CREATE TABLE dead_letters (
    dead_letter_id TEXT PRIMARY KEY,
    session_id TEXT NOT NULL,
    turn INTEGER NOT NULL,
    owner TEXT NOT NULL,
    agent TEXT NOT NULL,
    code TEXT NOT NULL,
    message TEXT NOT NULL,
    failed_at TEXT NOT NULL,
    requeued_at TEXT
);

CREATE INDEX dead_letters_by_time ON dead_letters (failed_at, dead_letter_id);

CREATE INDEX dead_letters_by_owner ON dead_letters (owner, failed_at, dead_letter_id);

CREATE INDEX dead_letters_of_session ON dead_letters (session_id);
