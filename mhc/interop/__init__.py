"""Translate models between Hugging Face's format and this project's.

``from_hf`` and ``to_hf`` translate models of Hugging Face; ``load_hf`` reads a folder of theirs. As programs:
``python -m mhc.interop.import_hf`` makes a run of one, ``python -m mhc.interop.export`` writes any run of ours.
"""

from mhc.extras import require_train

require_train(__name__)

from mhc.interop.folder import HfFolder  # noqa: E402
from mhc.interop.hf import from_hf, load_hf, to_hf  # noqa: E402

__all__ = ["HfFolder", "from_hf", "load_hf", "to_hf"]
