"""The benchmark datasets, built on the user's machine out of packages."""
