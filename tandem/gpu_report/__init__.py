"""What the workers do on a GPU, measured in a few minutes without Ray: `tandem gpu-report`."""
