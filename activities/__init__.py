"""The activities: thin wrappers around the methods of the harness.

Read `attempt`, `model`, `tools`, `turns`, `children`.
"""
