"""Read other people's weights and write ours.

``from_hf`` and ``to_hf`` translate models of Hugging Face, and ``load_hf`` reads a folder of one. As programs,
``python -m mhc.interop.import_hf`` makes a run of such a folder, and ``python -m mhc.interop.export`` writes any run.
"""

from mhc.extras import require_train

require_train(__name__)

from mhc.interop.connections import hyper_connections  # noqa: E402
from mhc.interop.folder import HfFolder  # noqa: E402
from mhc.interop.hf import from_hf, load_hf, to_hf  # noqa: E402

__all__ = ["HfFolder", "from_hf", "hyper_connections", "load_hf", "to_hf"]
