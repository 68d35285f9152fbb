"""Memory of a run: traced activations, and the setting that fits."""
