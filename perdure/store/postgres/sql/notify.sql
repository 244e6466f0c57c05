SELECT pg_notify('perdure_events', payload) FROM unnest(CAST(:payloads AS text[])) AS payload
