"""Fuzzing of everything that metabridge reads; `make fuzz` runs it."""
