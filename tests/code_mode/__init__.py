"""Programs that the model writes."""
