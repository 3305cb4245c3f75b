"""What lies on disk and how it gets there: records, whole-or-nothing files, timings and the artifact registry."""
