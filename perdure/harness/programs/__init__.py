"""Code mode: programs that the model writes, and the processes that they run in.

Read `program`, then `process`, which starts `sandbox` for each stage, then `stubs`. `sandbox` imports nothing of ours.
"""
