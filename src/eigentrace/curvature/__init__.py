"""Products of the Hessian or the Gauss-Newton matrix with vectors."""
