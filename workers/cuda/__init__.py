"""What is special to CUDA: the fused attention kernel, graphs, and a memory to share."""
