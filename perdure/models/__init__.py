"""Model providers behind one small Protocol. They know nothing of sessions. Read `base`, `demo`, `provider`."""
