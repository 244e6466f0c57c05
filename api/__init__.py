"""HTTP: one API over sessions, the store's reads and the agents. It sees no workflow and no activity."""
