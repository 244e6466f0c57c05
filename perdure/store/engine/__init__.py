"""What a store promises, over any SQL database. Each function gets a transaction and decides nothing about connections.

Read `store` (which method runs which transaction), `commit`, `deliveries`, `votes`.
"""
