"""One step each: build a workload, run its ranks, record, train, validate, publish."""
