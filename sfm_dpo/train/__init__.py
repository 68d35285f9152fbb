"""Training: the DPOTrainer subclass, the reference cache, metrics, checkpoints and callbacks."""
