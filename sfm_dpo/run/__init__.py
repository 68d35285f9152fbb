"""A run's folder: its files, state, checkpoints and log."""
