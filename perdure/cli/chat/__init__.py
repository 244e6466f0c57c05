"""A chat in the terminal with any session, over HTTP.

`command.py` starts it, `conversation.py` is its loop. `view.py` shows the events of a turn on the `screen.py`, and
`answers.py` reads what people answer. It knows a server by `perdure.client` alone.
"""
