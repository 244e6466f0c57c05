"""The routes, by subject. Each module has one class; its collaborators arrive by constructor."""
