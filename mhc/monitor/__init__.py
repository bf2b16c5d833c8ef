"""Measure a run: probes, detectors of instability, and the writers that keep the record."""

from mhc.extras import require_train

require_train(__name__)
