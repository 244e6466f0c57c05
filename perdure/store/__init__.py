"""What was said and done: sessions, deliveries, records, events, votes and authors' state.

`base` has the `Store` Protocol that everybody else uses, `values` what goes in and comes out, `open` makes a store from
an address. `engine` is the one logic, `sqlite` and `postgres` are what differs between the databases; SQL is in `.sql`
files. Nothing here knows Temporal, HTTP or a model. Read `values`, `base`, `engine.commit`, then the rest.
"""
