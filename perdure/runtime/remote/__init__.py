"""What reaches this server from others, and what it owes them: callbacks, in both directions."""
