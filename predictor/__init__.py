"""From a workload and hardware to seconds: closed forms, the learned hierarchy, and what the answer says of itself."""
