"""An app under the load of two keys, of which one floods it: what the other one notices."""
