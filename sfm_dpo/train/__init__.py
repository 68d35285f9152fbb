"""Training: the DPOTrainer subclass, the reference cache, metrics, and the callbacks of a run."""
