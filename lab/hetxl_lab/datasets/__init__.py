"""The benchmark datasets, built on the user's machine from packages."""
