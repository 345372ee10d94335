"""The Triton kernels, one file an op; nothing imports them before one runs."""
