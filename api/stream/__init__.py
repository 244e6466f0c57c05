"""A session's stream over HTTP. Read `broadcast` (live lines), `ndjson` (their encoding), `response`, `buffer`."""
