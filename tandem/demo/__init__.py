"""The bundled model pair: how it was trained, where it lies, and how to grow its target."""
