"""What a session is and what it does next: pure, no clock, no I/O."""
