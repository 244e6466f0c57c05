"""What is shown of the work on a session, made of what is stored anyway: `attempts`, then `timeline`.

Nothing is decided by it, and nothing here writes.
"""
