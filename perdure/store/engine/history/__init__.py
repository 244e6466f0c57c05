"""The state of earlier moments: forks, restores, checkpoints and rollbacks."""
