"""What a run measures about itself: probes, detectors of instability, and the writers that keep the record."""
