"""Turn a corpus into batches: sources, tokenisers, packing, and the pipeline over them."""

from mhc.extras import require_train

require_train(__name__)
