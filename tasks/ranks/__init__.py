"""What one rank of a cell does: build the model, apply precision and options, time its steps, write its rows."""
