"""Mixed-precision communication-avoiding SGD for generalised linear models; imports nothing else of the project."""
