"""Turn corpora into batches: sources, tokenisers, packing, and the pipeline."""

from mhc.extras import require_train

require_train(__name__)
