"""Checks of the model: before training (preflight) and during it (guard)."""
