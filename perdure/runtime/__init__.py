"""Where the core meets Temporal: connecting, starting sessions, delivering to them."""
