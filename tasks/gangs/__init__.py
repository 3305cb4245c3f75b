"""One cell on leased Dask workers: take them, start the ranks there, judge and record the rows."""
