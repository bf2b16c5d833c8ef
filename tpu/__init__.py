"""Programs and scripts for TPUs: sizing a run without one, creating slices, starting and resuming on them."""
