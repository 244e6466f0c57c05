"""The routes, by what they are about. Each is a class whose collaborators arrive by constructor."""
