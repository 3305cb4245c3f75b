"""Cells of CA-SGD: their place in the tables, the program of their ranks, and their start by mpiexec."""
