"""The benchmark: speculation against plain decoding on the same live server."""
