"""Products of the Hessian or the Gauss-Newton matrix with a vector."""
