INSERT INTO sessions (
    session_id, agent, mode, status, owner, principal, capabilities, title, tags, notes, turns,
    forked_from, forked_turns, fork_place, left_out, bounds, parent_id, lane, created_at, updated_at
)
VALUES (
    :session_id, :agent, :mode, 'waiting', :owner, :principal, :capabilities, :title, :tags, :notes,
    :turns, :forked_from, :forked_turns, :fork_place, :left_out, :bounds, :lane_of, :lane, :now, :now
)
