"""The workflows that drive sessions, as the rest of the runtime reaches them, and what is done when one is lost."""
