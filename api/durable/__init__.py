"""Reading as the Durable Streams protocol says: one code for every log that the API serves in this form.

Read `read` (the requests and what they read), `sources` (the logs of events), `offsets`, `joint`.
"""
