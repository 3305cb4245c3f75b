"""What a training job is set up as: precision, hardware, parallelism, and how its code runs."""
