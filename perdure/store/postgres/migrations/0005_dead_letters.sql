-- Turns that failed. An operator or the caller may have their messages read again.
CREATE TABLE dead_letters (
    dead_letter_id text COLLATE "C" PRIMARY KEY,
    session_id text COLLATE "C" NOT NULL,
    turn bigint NOT NULL,
    owner text COLLATE "C" NOT NULL,
    agent text COLLATE "C" NOT NULL,
    code text NOT NULL,
    message text NOT NULL,
    failed_at text COLLATE "C" NOT NULL,
    requeued_at text
);

CREATE INDEX dead_letters_by_time ON dead_letters (failed_at, dead_letter_id);

CREATE INDEX dead_letters_by_owner ON dead_letters (owner, failed_at, dead_letter_id);

CREATE INDEX dead_letters_of_session ON dead_letters (session_id);
