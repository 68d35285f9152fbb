"""Why two runs, or two code paths, differ."""
