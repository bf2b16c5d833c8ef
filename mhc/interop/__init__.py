"""Other people's weights in, ours out.

``from_hf`` and ``to_hf`` translate models of Hugging Face; ``load_hf`` reads a folder of theirs. As programs:
``python -m mhc.interop.import_hf`` makes a run of one, ``python -m mhc.interop.export`` writes any run of ours.
"""

from mhc.interop.folder import HfFolder
from mhc.interop.hf import from_hf, load_hf, to_hf

__all__ = ["HfFolder", "from_hf", "load_hf", "to_hf"]
