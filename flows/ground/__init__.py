"""What all flows use: settings files, Prefect's settings and pages, and runs that fail with a plain message."""
