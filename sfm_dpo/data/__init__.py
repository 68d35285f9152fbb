"""Preference pairs: reading, checks, tokenization, lengths, and their order in training."""
