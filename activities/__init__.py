"""The activities: thin wrappers around the methods of the harness."""
