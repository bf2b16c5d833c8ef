"""Test the configuration: the messages for mistakes, and that no value is lost from file to dataclass to JSON."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ml_collections import ConfigDict

import train
from configs import default, demo
from mhc import cli, kinds
from mhc import config as config_lib
from mhc.config import Config
from mhc.errors import UserError


def make(**fields: Any) -> Config:
    """Return the Config of ``group__field=value`` arguments."""
    tree: dict[str, dict[str, Any]] = {}
    for name, value in fields.items():
        group, _, leaf = name.partition("__")
        tree.setdefault(group, {})[leaf] = value
    return config_lib.from_config_dict(tree)


def test_default_file_equals_the_dataclasses() -> None:
    assert config_lib.from_config_dict(default.get_config()) == Config()
    in_file = {f"{group}.{leaf}" for group, fields in default.get_config().to_dict().items() for leaf in fields}
    assert in_file == set(config_lib.field_names())


def test_default_file_is_locked() -> None:
    with pytest.raises(AttributeError):
        default.get_config().train.stesp = 3


@pytest.mark.parametrize("group", ["residual"])
def test_a_wrong_name_in_a_group_that_is_open_is_told_when_the_config_is_made(group: str) -> None:
    """The group's kinds may bring options from elsewhere, so that ml_collections cannot know the names."""
    config = default.get_config()
    config[group]["sinkorn"] = "paper"
    with pytest.raises(UserError, match=r"residual\.sinkorn: unknown field \(did you mean residual\.sinkhorn\?\)"):
        config_lib.from_config_dict(config)


@pytest.mark.parametrize("name", list(config_lib.field_names()))
def test_placeholders_take_what_the_dataclass_takes(name: str) -> None:
    """A field that is None in the default file has a type, and another config file may set it to that type alone."""
    group, _, leaf = name.partition(".")
    field = config_lib.fields_of(group)[leaf]
    if field.default is None:
        kind = default.get_config()[group].get_type(leaf)
        assert field.hint == kind | None


@pytest.mark.parametrize("name", list(config_lib.field_names()))
def test_every_field_is_listed_with_its_default_and_its_choices(name: str) -> None:
    group, _, leaf = name.partition(".")
    field = config_lib.fields_of(group)[leaf]
    assert field.rule.doc
    (line,) = [line for line in cli.field_lines(group) if line.startswith(f"{name} = ")]
    assert line in cli.field_lines("")
    assert line.startswith(f"{name} = {field.default!r}  # ")
    assert all(choice in line for choice in field.rule.allowed())


def test_the_list_of_fields_is_printed_whole_or_by_group(capsys: pytest.CaptureFixture[str]) -> None:
    assert train.main(["--fields"]) == 0
    whole = capsys.readouterr().out.splitlines()
    assert [line.partition(" = ")[0] for line in whole] == list(config_lib.field_names())
    assert train.main(["--fields", "residual"]) == 0
    assert capsys.readouterr().out.splitlines() == [line for line in whole if line.startswith("residual.")]
    with pytest.raises(UserError, match=r"--fields: unknown group resiudal \(did you mean residual\?\)"):
        train.main(["--fields", "resiudal"])


def test_groups_are_frozen() -> None:
    for group in config_lib.groups():
        part = getattr(Config(), group)
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(part, dataclasses.fields(part)[0].name, 1)


def test_demo_is_deep_and_narrow() -> None:
    config = config_lib.from_config_dict(demo.get_config())
    assert config.model.layers >= 4 * config.model.width // 32
    assert config_lib.diff(Config(), config)


# Round trips --------------------------------------------------------------------------------------------------------


@given(
    st.fixed_dictionaries(
        {
            "residual": st.sampled_from(
                [
                    {"kind": "plain", "scale": 0},
                    {"kind": "hc", "n": 2, "alpha": 0.1},
                    {"kind": "mhc", "init": "v4", "collapse": "head"},
                ]
            ),
            "schedule": st.fixed_dictionaries(
                {
                    "kind": st.sampled_from(["constant", "cosine", "linear"]),
                    "final_ratio": st.floats(0, 1),
                    "step_fractions": st.lists(st.floats(0, 1), max_size=3),
                }
            ),
            "optimizer": st.fixed_dictionaries({"clip_norm": st.none() | st.floats(0.1, 10), "lr": st.integers(0, 3)}),
            "data": st.fixed_dictionaries({"source": st.just("text:a/**/*.txt"), "field": st.text()}),
            "train": st.fixed_dictionaries({"steps": st.integers(1, 10**9)}),
        }
    )
)
def test_round_trips(tree: dict[str, dict[str, Any]]) -> None:
    config = config_lib.from_config_dict(tree)
    assert config_lib.from_config_dict(ConfigDict(tree)) == config
    again = config_lib.from_json(config_lib.to_json(config))
    assert again == config
    assert repr(again) == repr(config)  # tuples stay tuples and floats floats, which == alone does not tell
    assert config_lib.from_config_dict(config_lib.to_dict(config)) == config
    assert not config_lib.diff(again, config)


def test_ints_become_floats_and_lists_tuples() -> None:
    config = make(optimizer__lr=1, schedule__step_fractions=[0, 1], schedule__step_ratios=(1, 0))
    assert repr(config.optimizer.lr) == "1.0"
    assert repr(config.schedule.step_fractions) == "(0.0, 1.0)"


def test_json_is_the_nested_dict() -> None:
    assert json.loads(config_lib.to_json(Config()))["model"]["layers"] == Config().model.layers


def test_broken_json_is_a_users_mistake() -> None:
    with pytest.raises(UserError, match="line 1, column 2"):
        config_lib.from_json("{")


# Mistakes -----------------------------------------------------------------------------------------------------------

MISTAKES = [
    # unknown names
    ({"residual__kidn": "hc"}, "residual.kidn: unknown field (did you mean residual.kind?); residual has: kind, n,"),
    ({"resdual__kind": "hc"}, "unknown group resdual (did you mean residual?)"),
    ({"train__zzz": 1}, "train.zzz: unknown field; train has: steps, batch_size, accumulation"),
    # types
    ({"train__steps": "abc"}, "train.steps: given 'abc', allowed: an int >= 1"),
    ({"train__steps": 1.5}, "train.steps: given 1.5, allowed: an int"),
    ({"train__steps": True}, "train.steps: given True, allowed: an int"),
    ({"train__steps": None}, "train.steps: given None, allowed: an int >= 1"),
    ({"optimizer__lr": True}, "optimizer.lr: given True, allowed: a float >= 0"),
    ({"optimizer__lr": math.nan}, "optimizer.lr: given nan"),
    ({"optimizer__lr": math.inf}, "optimizer.lr: given inf"),
    ({"model__scan": 1}, "model.scan: given 1, allowed: True or False"),
    ({"residual__n": "4"}, "residual.n: given '4', allowed: an int >= 1 or None"),
    ({"data__field": 3}, "data.field: given 3, allowed: a string"),
    ({"schedule__step_ratios": 0.1}, "schedule.step_ratios: given 0.1, allowed: a tuple of floats >= 0"),
    ({"schedule__step_ratios": ("a", "b")}, "schedule.step_ratios: given 'a', allowed: a tuple of floats >= 0"),
    # ranges and choices
    ({"train__steps": 0}, "train.steps: given 0, allowed: an int >= 1"),
    ({"residual__n": 9}, "residual.n: given 9, allowed: from 1 to 8 with residual.kind=mhc"),
    ({"residual__n": 0}, "residual.n: given 0, allowed: an int >= 1 or None"),
    ({"optimizer__b2": 1.0}, "optimizer.b2: given 1.0, allowed: a float >= 0 and < 1"),
    ({"optimizer__clip_norm": 0.0}, "optimizer.clip_norm: given 0.0, allowed: a float > 0 or None"),
    (
        {"residual__kind": "mch"},
        f"residual.kind: given 'mch', allowed: one of {', '.join(kinds.names())} (did you mean mhc?)",
    ),
    ({"model__dtype": "bf16"}, "model.dtype: given 'bf16', allowed: one of float32, bfloat16 (did you mean bfloat16?)"),
    ({"data__source": "txt:a.txt"}, "data.source: given 'txt:a.txt', allowed: one of stdlib, tfds:<name>, text:<glob>"),
    ({"data__source": "text:"}, "data.source: given 'text:'"),
    ({"data__validation": "stdlb"}, "data.validation: given 'stdlb', allowed: one of stdlib, tfds:<name>"),
    ({"mesh__data": 0}, "mesh.data: given 0, allowed: -1 or an int >= 1"),
    # combinations
    ({"residual__kind": "plain", "residual__n": 2}, "residual.n: given 2, allowed: 1 with residual.kind=plain"),
    ({"residual__kind": "plain", "residual__init": "home"}, "residual.init: given 'home', allowed: None with"),
    ({"residual__kind": "plain", "residual__alpha": 0.1}, "residual.alpha: given 0.1, allowed: None with"),
    (
        {"residual__kind": "plain", "residual__collapse": "head"},
        "residual.collapse: given 'head', allowed: mean or sum",
    ),
    ({"residual__kind": "hc", "residual__init": "home"}, "residual.init: given 'home', allowed: hc with"),
    ({"residual__kind": "mhc", "residual__init": "hc"}, "allowed: home or equivalent or fanin or v4 with"),
    ({"residual__kind": "mhc", "residual__scale": 0.5}, "residual.scale: given 0.5, allowed: 1.0 with"),
    ({"residual__kind": "mhc", "residual__dynamic": False}, "residual.dynamic: given False, allowed: True with"),
    ({"residual__kind": "mhc", "residual__tanh": False}, "residual.tanh: given False, allowed: True with"),
    ({"residual__kind": "mhc", "residual__decay_dynamic": True}, "residual.decay_dynamic: given True, allowed: False"),
    (
        {"residual__kind": "hc", "residual__dynamic": False, "residual__decay_dynamic": True},
        "residual.decay_dynamic: given True, allowed: False with residual.dynamic=False",
    ),
    ({"residual__kind": "hc", "residual__dynamic": False, "residual__alpha": 0.1}, "residual.alpha: given 0.1"),
    ({"model__width": 10}, "attention.heads: given 4, allowed: a divisor of model.width=10"),
    ({"attention__kv_heads": 3}, "attention.kv_heads: given 3, allowed: a divisor of attention.heads=4"),
    ({"model__width": 12}, "model.width: given 12, allowed: an even multiple of attention.heads=4"),
    ({"attention__head_dim": 7}, "attention.head_dim: given 7, allowed: an even number"),
    ({"train__accumulation": 5}, "train.accumulation: given 5, allowed: a divisor of train.batch_size=32"),
    ({"mesh__fsdp": 3}, "train.batch_size: given 32, allowed: a multiple of 3"),
    ({"train__accumulation": 8, "mesh__data": 8}, "train.batch_size: given 32, allowed: a multiple of 64"),
    ({"schedule__warmup_steps": 1001}, "schedule.warmup_steps: given 1001, allowed: at most train.steps=1000"),
    (
        {"schedule__warmup_steps": 11, "schedule__decay_steps": 10},
        "schedule.warmup_steps: given 11, allowed: at most schedule.decay_steps=10",
    ),
    (
        {"schedule__kind": "wsd", "schedule__warmup_steps": 600, "schedule__wsd_fraction": 0.5},
        "schedule.wsd_fraction: given 0.5, allowed: at most 0.4",
    ),
    (
        {"schedule__kind": "wsd", "schedule__warmup_steps": 600, "schedule__wsd_steps": 401},
        "schedule.wsd_steps: given 401, allowed: at most 400: 600 of 1000 steps warm up",
    ),
    ({"schedule__wsd_steps": 5}, "schedule.wsd_steps: given 5, allowed: None unless schedule.kind=wsd"),
    ({"schedule__wsd_shape": "sqrt"}, "schedule.wsd_shape: given 'sqrt', allowed: linear unless schedule.kind=wsd"),
    ({"train__init_data": True}, "train.init_data: given True, allowed: False without train.init_from"),
    (
        {"schedule__kind": "step", "schedule__step_ratios": (0.1,)},
        "schedule.step_ratios: given (0.1,), allowed: as many as schedule.step_fractions=(0.8, 0.9)",
    ),
    (
        {"schedule__kind": "step", "schedule__step_fractions": (0.9, 0.8)},
        "schedule.step_fractions: given (0.9, 0.8), allowed: increasing",
    ),
    ({"monitor__zscore_min_history": 200}, "monitor.zscore_min_history: given 200, allowed: at most"),
]


@pytest.mark.parametrize(("fields", "words"), MISTAKES, ids=lambda value: value[:40] if isinstance(value, str) else "")
def test_a_mistake_is_one_line_that_says_what_is_allowed(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError) as caught:
        make(**fields)
    message = str(caught.value)
    assert words in message
    assert "\n" not in message


@pytest.mark.parametrize("tree", [{"train": 3}, {"train": None}, {"trian": {}}, {"steps": 3}, [], None])
def test_a_tree_of_another_shape_is_refused(tree: Any) -> None:
    with pytest.raises(UserError):
        config_lib.from_config_dict(tree)


def test_a_field_without_its_group_is_told_where_it_stands() -> None:
    with pytest.raises(UserError, match=re.escape("did you mean train.batch_size?")):
        config_lib.from_config_dict({"batch_size": 3})


def test_a_dataclass_made_by_hand_is_checked_too() -> None:
    with pytest.raises(UserError, match=re.escape("residual.n: given 9")):
        dataclasses.replace(Config().residual, n=9)
    with pytest.raises(UserError, match=re.escape("train.accumulation: given 3")):
        dataclasses.replace(Config(), train=config_lib.TrainConfig(accumulation=3))


ALLOWED = [
    {"residual__kind": "plain", "residual__n": 1, "residual__scale": 0},
    {"residual__kind": "hc", "residual__init": "hc", "residual__decay_dynamic": True, "residual__tanh": False},
    *({"residual__kind": "mhc", "residual__init": init} for init in kinds.known()["mhc"].inits),
    *({"residual__kind": "mhc", "residual__n": n} for n in range(1, 9)),
    {"model__width": 10, "attention__head_dim": 6},
    {"model__width": 12, "positions__kind": "none"},
    {"attention__heads": 4, "attention__kv_heads": 1},
    {"schedule__kind": "wsd", "schedule__warmup_steps": 500, "schedule__wsd_fraction": 0.5},
    {"schedule__warmup_steps": 1000},
    {"train__accumulation": 4, "mesh__data": 2, "mesh__fsdp": 4},
    {"data__source": "tokens:corpus/*.bin", "data__end_token": 0, "data__validation": "tfds:wikipedia/en"},
]


@pytest.mark.parametrize("fields", ALLOWED, ids=str)
def test_what_goes_together_is_taken(fields: dict[str, Any]) -> None:
    config = make(**fields)
    for name, value in fields.items():
        group, _, leaf = name.partition("__")
        assert getattr(getattr(config, group), leaf) == value


# Values from a command line -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("residual.n", "4", 4),
        ("residual.n", "None", None),
        ("optimizer.clip_norm", "None", None),
        ("optimizer.lr", "3e-4", 3e-4),
        ("optimizer.lr", "1", 1.0),
        ("model.scan", "false", False),
        ("model.scan", "True", True),
        ("data.field", "None", "None"),
        ("data.cache_dir", "None", None),
        ("schedule.step_fractions", "(0.5, 0.7)", (0.5, 0.7)),
        ("schedule.step_fractions", "0.5,0.7", (0.5, 0.7)),
        ("mesh.data", "-1", -1),
    ],
)
def test_parse_value(name: str, text: str, value: Any) -> None:
    assert config_lib.parse_value(name, text) == value


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("train.steps", "abc"),
        ("train.steps", "1.5"),
        ("train.steps", "True"),
        ("train.steps", ""),
        ("train.steps", "None"),
        ("optimizer.lr", "nan"),
        ("model.scan", "maybe"),
        ("schedule.step_fractions", "(0.5"),
        ("train", "3"),
        ("train.", "3"),
    ],
)
def test_parse_value_refuses(name: str, text: str) -> None:
    with pytest.raises(UserError, match=re.escape(name)):
        config_lib.parse_value(name, text)


def test_describe_gives_meaning_and_range() -> None:
    assert config_lib.describe("residual.n") == "streams N; None: the kind's default [an int >= 1 or None]"


# Derived fields -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "n", "init", "collapse"),
    [
        ({"residual__kind": "plain"}, 1, None, "mean"),
        ({"residual__kind": "hc"}, 4, "hc", "sum"),
        ({"residual__kind": "mhc"}, 4, "home", "mean"),
        ({"residual__kind": "mhc", "residual__n": 2, "residual__init": "v4"}, 2, "v4", "mean"),
    ],
)
def test_resolve_fills_the_topology(fields: dict[str, Any], n: int, init: str | None, collapse: str) -> None:
    residual = config_lib.resolve(make(**fields), vocab_size=258).residual
    assert (residual.n, residual.init, residual.collapse) == (n, init, collapse)


@given(st.integers(1, 200))
def test_resolve_fills_the_shapes(multiple: int) -> None:
    width = 8 * multiple
    config = config_lib.resolve(make(model__width=width), vocab_size=300)
    assert config.model.vocab_size == 300
    assert config.attention.kv_heads == config.attention.heads
    assert config.attention.head_dim is not None
    assert config.attention.head_dim * config.attention.heads == width
    assert config.schedule.decay_steps == config.train.steps
    hidden = config.mlp.width
    assert hidden is not None
    assert hidden % 8 == 0
    assert 0 <= hidden - 8 * width / 3 < 8
    assert config_lib.resolve(config, vocab_size=300) == config
    assert config_lib.resolve(make(model__width=width, mlp__kind="gelu"), vocab_size=300).mlp.width == 4 * width


def test_the_vocabulary_is_not_known_before_resolve() -> None:
    with pytest.raises(ValueError, match="resolve"):
        _ = Config().vocab_size
    assert resolved().vocab_size == 258


def test_resolve_refuses_a_vocabulary_smaller_than_the_tokeniser() -> None:
    with pytest.raises(UserError, match=re.escape("model.vocab_size: given 100, allowed: at least 258")):
        config_lib.resolve(make(model__vocab_size=100), vocab_size=258)
    assert config_lib.resolve(make(model__vocab_size=512), vocab_size=258).model.vocab_size == 512


# Resuming -----------------------------------------------------------------------------------------------------------


def resolved(**fields: Any) -> Config:
    """Return the resolved Config of ``group__field=value`` arguments, for a vocabulary of 258."""
    return config_lib.resolve(make(**fields), vocab_size=258)


def test_diff_names_fields_with_both_values() -> None:
    changes = config_lib.diff(make(), make(train__steps=5, residual__kind="hc"))
    assert changes == {"residual.kind": ("mhc", "hc"), "train.steps": (1000, 5)}


def test_nothing_changed_is_nothing_to_say() -> None:
    assert config_lib.check_resume(resolved(), resolved()) == {}


def test_every_resumable_entry_names_something() -> None:
    for entry in config_lib.RESUMABLE:
        assert any(
            name == entry or (entry.endswith(".") and name.startswith(entry)) for name in config_lib.field_names()
        )


def test_allowed_changes_are_listed() -> None:
    new = resolved(checkpoint__keep=5, mesh__data=2, monitor__probe_every=0, data__prefetch=0, validation__every=7)
    changed = {"checkpoint.keep", "mesh.data", "monitor.probe_every", "data.prefetch", "validation.every"}
    assert set(config_lib.check_resume(resolved(), new)) == changed


def test_the_end_of_the_decay_moves_with_the_steps() -> None:
    changes = config_lib.check_resume(resolved(), resolved(train__steps=2000))
    assert changes == {"schedule.decay_steps": (1000, 2000), "train.steps": (1000, 2000)}
    pinned = resolved(schedule__decay_steps=1000, train__steps=2000)
    assert set(config_lib.check_resume(resolved(), pinned)) == {"train.steps"}
    with pytest.raises(UserError, match=re.escape("schedule.decay_steps: stored 500, given 600")):
        config_lib.check_resume(resolved(schedule__decay_steps=500), resolved(schedule__decay_steps=600))


def test_refused_changes_are_all_named_with_both_values() -> None:
    new = resolved(residual__kind="hc", optimizer__lr=0.1, train__steps=2000)
    with pytest.raises(UserError) as caught:
        config_lib.check_resume(resolved(), new)
    message = str(caught.value)
    assert "residual.kind: stored 'mhc', given 'hc'" in message
    assert "optimizer.lr: stored 0.001, given 0.1" in message
    assert "train.steps: stored" not in message
    assert "\n" not in message
