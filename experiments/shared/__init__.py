"""What the experiments of several areas use: their command line, their files, what they keep."""
