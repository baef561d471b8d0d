"""Datasets that are built on the user's machine from packages: their sources, and how they are built and stored."""
