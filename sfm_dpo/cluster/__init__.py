"""Slurm and the launchers: how ranks start, what follows when a job ends, and checks of nodes and GPUs."""
