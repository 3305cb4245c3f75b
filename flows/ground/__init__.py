"""What all flows use: settings files, Prefect settings and pages, plain errors, processes that end together."""
