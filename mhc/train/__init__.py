"""Training: the loop, the compiled step, optimisers, checkpoints."""

from mhc.extras import require_train

require_train(__name__)
