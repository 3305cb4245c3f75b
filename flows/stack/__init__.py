"""The product as services on one machine: `up`, `doctor`, Prefect's deployments and automations."""
