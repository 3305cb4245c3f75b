"""What is learned from measurements: boosted trees, their blend with closed forms, intervals, shared errors."""
