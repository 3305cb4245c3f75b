"""How good predictions are: errors on rows that were not trained on, by split, and their plots."""
