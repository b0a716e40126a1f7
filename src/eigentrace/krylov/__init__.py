"""Arnoldi and Lanczos iterations, and the eigenpairs that they end with."""
