"""Train a model: the loop, the compiled step, optimisers and checkpoints."""

from mhc.extras import require_train

require_train(__name__)
