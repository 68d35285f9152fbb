"""What is done with runs: their life and evaluation; and the GPU check."""
