"""One cell on leased Dask workers: take them whole, start the ranks, judge and record what they wrote."""
