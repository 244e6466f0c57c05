"""The console: a page that shows sessions and talks to them, with the public API alone.

`pages` serves it. What is in `static/` runs in the browser as it is: there is no build step. Read `main.js`, `fold.js`.
It must know nothing of sessions: all that it shows comes from the API, with the credentials of its user.
"""
