"""Preference pairs: read, checked, tokenized, measured, and put in order."""
