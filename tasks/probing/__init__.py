"""Probes of this machine: its device and speed, and a few real iterations of a model on it."""
