"""Cells of CA-SGD: how they stand in the tables, what their ranks run, and how mpiexec starts them."""
