"""Use TPUs: size a run without one, create slices, start and resume runs on them."""
