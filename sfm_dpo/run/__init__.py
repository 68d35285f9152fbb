"""A run's folder: what is in it, its state, its checkpoints, its log."""
