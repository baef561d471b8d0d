"""The lab: benchmark datasets, and studies that test what hetxl claims and what the paper found."""
