"""Retraining, the nightly one and roll-back as Prefect flows, and what their forms ask."""
