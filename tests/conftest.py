"""What all tests share."""

pytest_plugins = ["tests.support.plugin", "tests.support.postgres"]
