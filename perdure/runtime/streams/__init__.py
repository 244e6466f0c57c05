"""Streams from outside: what callers write to streams of their own, and the sessions behind names that they choose.

Read `written` and `instances`.
"""
