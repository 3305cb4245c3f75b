"""Where campaigns run: local workers, a Dask scheduler or Slurm; locks on devices, and the scratch folder."""
