"""Retraining, nightly retraining and roll-back as Prefect flows, with their settings."""
