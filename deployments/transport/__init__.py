"""How routers reach workers: over Serve's handles, and over streams of our own."""
