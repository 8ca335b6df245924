"""Stand-ins that hold the code to what NCCL and CUDA promise, on a machine without a GPU."""
