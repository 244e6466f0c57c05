-- Forks that share turns from :from_turn on, with the turns up to :until_turn at most, get another parent.
-- The place at which they were forked is one of the first parent.
UPDATE sessions
SET forked_from = CAST(:parent AS text),
    fork_place = NULL
WHERE forked_from = :session_id AND forked_turns > :from_turn AND forked_turns <= :until_turn AND session_id <> :heir
