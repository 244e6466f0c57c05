"""The database: sessions, deliveries, records, events, votes and authors' state.

`base` has the `Store` Protocol that other packages use, `values` its arguments and results, `open` makes a store from
an address. `engine` implements the Protocol once, over the databases of `sqlite` and `postgres`. SQL is in `.sql`
files. Nothing here knows Temporal, HTTP or a model. Read `values`, `base`, `engine.commit`, then the rest.
"""
