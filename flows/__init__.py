"""What runs when: campaigns and retraining as Prefect flows; no measuring and no mathematics."""
