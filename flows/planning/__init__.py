"""A campaign before it runs: its settings, its grid, its order, its limits, and how long it will take."""
