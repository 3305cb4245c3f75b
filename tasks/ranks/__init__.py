"""One rank of a cell: build the model, apply precision and run options, time its steps, write its rows."""
