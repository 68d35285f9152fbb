"""Helpers without a subject of their own: errors, command lines, secrets, statistics, ranks, files."""
