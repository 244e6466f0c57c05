"""What activities do: build prompts, call models and tools, and record what happened. No Temporal, no HTTP.

Read `harness` first, then `model_call`, `reply` and `tools/call`; `resume` and `turn` are the way in and out of a park.
`tools/children`, `programs/program` and `remote` are for agents that use agents.
`controls` and `compaction` change what later prompts hold, `tools/budget` is around model calls, and `rebuild` derives
a driver's state.
"""
