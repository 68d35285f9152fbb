"""Verbs around finished runs: averaging, benchmarks, preference evaluation."""
