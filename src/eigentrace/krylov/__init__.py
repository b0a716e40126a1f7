"""Arnoldi and Lanczos iterations, and the eigenpairs computed from them."""
