"""Checks before and during training: node check, preflight, guard."""
