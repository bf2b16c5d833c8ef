"""Data: sources, tokenisers, packing, and the pipeline that turns them into batches."""

from mhc.extras import require_train

require_train(__name__)
