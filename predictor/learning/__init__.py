"""What is learned from measurements: boosted trees, their blend with the closed forms, intervals, error covariances."""
