"""Evaluation of a trained model: benchmarks of lm-eval, and a command for each checkpoint."""
