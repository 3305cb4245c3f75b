"""From recorded timings to a published predictor: train, validate, pass the gate, publish, report."""
