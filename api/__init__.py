"""The HTTP API over sessions, the store's reads and the agents. It knows nothing of workflows and activities.

Read `server` (the process), `app` (the routes), `routes/`, `bodies` and `responses`, `stream/`.
"""
