"""Sessions in any order of events: everything is real except Temporal, which is played in memory, step by step."""
