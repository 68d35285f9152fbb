"""What is done with runs: their life, averages, evaluation, sweeps; and the GPU check."""
