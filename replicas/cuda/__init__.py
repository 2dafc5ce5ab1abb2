"""What a step is on CUDA: graphs, slots and kernels."""
