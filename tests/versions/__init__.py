"""A fixture of every version of every durable shape that was ever shipped, and what lifts it."""
