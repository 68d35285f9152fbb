"""Checks before and during training: node, preflight, guard."""
