"""The product as services on one machine: `up`, `doctor`, and Prefect's deployments and automations."""
