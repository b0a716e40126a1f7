"""Shared by the experiments of all areas: command line, data files, caches of trained networks."""
