"""The world that tests/chaos breaks and tests/parking asks questions, and what is known of it."""
