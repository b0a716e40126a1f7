"""The networks of the experiments and how they are trained, one file each."""
