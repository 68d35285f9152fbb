"""General helpers: errors, command lines, secrets, statistics, ranks, files."""
