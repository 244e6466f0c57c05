INSERT INTO sessions (
    session_id, agent, mode, status, owner, principal, capabilities, parent, parent_id, root_id, title, tags, bounds,
    run, lane, created_at, updated_at
)
VALUES (
    :session_id, :agent, :mode, 'starting', :owner, :principal, :capabilities, :parent, :parent_id, :root_id, :title,
    :tags, :bounds, :run, :lane, :now, :now
)
ON CONFLICT DO NOTHING
RETURNING session_id
