"""Triton kernels, one a file. Imported only where there is a GPU or Triton's interpreter: a CPU torch has no triton."""
