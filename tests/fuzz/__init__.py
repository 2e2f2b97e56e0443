"""Fuzz targets, each a program: whatever bytes arrive, typed errors come back and nothing is launched."""
