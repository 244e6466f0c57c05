"""`perdure trace`: where the time of a session has gone. `spans` makes a tree of what is stored, `chart` shows it.

It is made of events and of reports of attempts each time, and has names, ids, counts and times: no content.
"""
