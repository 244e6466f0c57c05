"""Runs: their functions are entered again and again, and what they have done is looked up in the records.

Read `runner`, `body`, `waits`, `outcomes`, `records`.
"""
