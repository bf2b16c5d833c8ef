"""Describe a run by frozen, validated dataclasses.

Config files and command lines hold an ``ml_collections.ConfigDict`` (``configs/*.py``, ``--config.field=value``).
`from_config_dict` turns it into a `Config`; nothing below sees a ConfigDict. ``None`` means "derive it" or "none", as
the words of the field say, and `resolve` fills in what derives from other fields.

A group checks its fields when it is made, and a `Config` their combinations, so that one that exists is valid, also
after ``dataclasses.replace``. Every complaint is a ``UserError`` of one line: the field, the value, what is allowed.

    fields    every field: type, default, meaning, allowed values
    scales    those of the norms, and of the factor of the feed-forward's output
    sources   the syntax of data.source and data.validation
    residual  the group whose fields depend on the residual kind; kind_modules imports kinds from elsewhere
    group     the base of a group
    derived   the values that derive from several fields
    checks    the combinations that are refused
    config    Config and resolve
    names     fields by dotted name
    convert   ConfigDicts, nested dicts, JSON, overrides
    resume    what may change when a run is resumed
"""

from mhc.config.config import Config, is_derived, resolve
from mhc.config.convert import (
    change,
    default,
    from_config_dict,
    from_json,
    load_kinds,
    to_dict,
    to_json,
    upgraded,
)
from mhc.config.derived import GATED, ZSCORE_HISTORY
from mhc.config.fields import (
    AttentionConfig,
    CheckpointConfig,
    DataConfig,
    DistributedConfig,
    GuardConfig,
    HeadConfig,
    InitConfig,
    KernelsConfig,
    MeshConfig,
    MlpConfig,
    ModelConfig,
    MoeConfig,
    MonitorConfig,
    OptimizerConfig,
    PositionsConfig,
    ResidualConfig,
    ScheduleConfig,
    SeedConfig,
    TrainConfig,
    ValidationConfig,
    WatchdogConfig,
)
from mhc.config.kind_modules import ModuleError
from mhc.config.names import (
    Field,
    default_of,
    describe,
    field_names,
    fields_of,
    groups,
    parse_value,
    value_of,
)
from mhc.config.resume import (
    MACHINE,
    RESUMABLE,
    check_resume,
    diff,
    keep_history,
    keep_validation_rule,
    kept_validation,
)
from mhc.config.scales import NormConfig, UpdateConfig
from mhc.config.sources import SOURCES, Share, shares

__all__ = [
    "GATED",
    "MACHINE",
    "RESUMABLE",
    "SOURCES",
    "ZSCORE_HISTORY",
    "AttentionConfig",
    "CheckpointConfig",
    "Config",
    "DataConfig",
    "DistributedConfig",
    "Field",
    "GuardConfig",
    "HeadConfig",
    "InitConfig",
    "KernelsConfig",
    "MeshConfig",
    "MlpConfig",
    "ModelConfig",
    "ModuleError",
    "MoeConfig",
    "MonitorConfig",
    "NormConfig",
    "OptimizerConfig",
    "PositionsConfig",
    "ResidualConfig",
    "ScheduleConfig",
    "SeedConfig",
    "Share",
    "TrainConfig",
    "UpdateConfig",
    "ValidationConfig",
    "WatchdogConfig",
    "change",
    "check_resume",
    "default",
    "default_of",
    "describe",
    "diff",
    "field_names",
    "fields_of",
    "from_config_dict",
    "from_json",
    "groups",
    "is_derived",
    "keep_history",
    "keep_validation_rule",
    "kept_validation",
    "load_kinds",
    "parse_value",
    "resolve",
    "shares",
    "to_dict",
    "to_json",
    "upgraded",
    "value_of",
]
