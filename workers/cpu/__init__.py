"""What makes a step fast on a CPU: kernels, packed weights, compiled forwards."""
