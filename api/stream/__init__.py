"""A session's stream over HTTP.

Read `broadcast` (live lines), `ndjson` (their encoding), `faces` (the forms of it), `response`, `buffer`.
"""
