"""Studies: comparisons over several datasets that answer one question each, restartable, with their results on disk."""
