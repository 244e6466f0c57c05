"""Reading as the Durable Streams protocol says: one code for every log that the API serves in this form.

Read `read` (the requests and what they read), `sse`, `sources` (the logs), `flue` (their events in Flue's words),
`errors`.
"""
