"""Fuzz tests of all files that metabridge reads. `make fuzz` runs them."""
