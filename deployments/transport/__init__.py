"""How routers reach workers: streams of our own, to replicas that are found over Serve's
handles."""
