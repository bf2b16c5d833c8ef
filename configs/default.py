"""Every field of a run with its default, as a config file; ``python train.py --fields`` prints them with their meaning.

``None`` means "derive it" or "none", as the field's words say; from a command line: ``--config.residual.n=4``,
``--config.optimizer.clip_norm=None``. A file of your own changes what it needs to and keeps the rest: configs/demo.py.
"""

from __future__ import annotations

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from mhc.config import fields_of, groups
from mhc.rules import unwrapped


def get_config() -> ConfigDict:
    """Return the default configuration, locked: a field that does not exist cannot be set by mistake."""
    config = ConfigDict()
    for group in groups():
        config[group] = part = ConfigDict()
        for field in fields_of(group).values():
            part[field.name] = placeholder(unwrapped(field.hint)[0]) if field.default is None else field.default
    config.lock()
    # A kind from elsewhere may bring options that are known once its module is imported: a wrong name is told then.
    config.residual.unlock()
    return config
