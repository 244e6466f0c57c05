INSERT INTO runs (session_id, workflow_name, owner, status, started_at, input, trace_carrier)
VALUES (:session_id, :name, :owner, 'active', :now, :input, :trace_carrier)
