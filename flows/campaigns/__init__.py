"""A campaign while it runs: which cell starts when, what terminals and pages show, and its report."""
