"""Workloads: named networks with their walks and size cards, read without torch."""
