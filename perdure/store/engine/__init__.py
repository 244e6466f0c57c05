"""The store's operations over any SQL database. Each function gets an open transaction; connections are elsewhere.

Read `store` (which method runs which transaction), `commit`, `deliveries`, `forks`.
"""
