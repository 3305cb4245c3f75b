"""How good predictions are: errors of rows that a fit has not seen, by split, and the pictures of them."""
