"""The bare floor: what the shape of a turn costs when nothing happens in it."""
