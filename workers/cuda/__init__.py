"""What makes a step fast on CUDA: the fused attention kernel and graphs."""
