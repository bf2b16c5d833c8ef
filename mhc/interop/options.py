"""Read a foreign config.json option by option, and refuse the options that no reader asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from mhc.errors import UserError

# Options that do not change the function from tokens to logits: training, generation, bookkeeping.
_HARMLESS = """
_attn_implementation _attn_implementation_autoset _commit_hash _name_or_path architectures attn_implementation
attention_dropout auto_map bad_words_ids begin_suppress_tokens bos_token_id chunk_size_feed_forward
classifier_dropout cross_attention_hidden_size decoder_start_token_id diversity_penalty do_sample dtype
early_stopping encoder_no_repeat_ngram_size eos_token_id exponential_decay_length_penalty finetuning_task
forced_bos_token_id forced_eos_token_id hidden_dropout id2label initializer_range is_encoder_decoder
keys_to_ignore_at_inference label2id length_penalty max_length min_length model_type no_repeat_ngram_size
num_beam_groups num_beams num_return_sequences output_attentions output_hidden_states output_router_logits
output_scores pad_token_id prefix pretraining_tp problem_type remove_invalid_values repetition_penalty return_dict
return_dict_in_generate sep_token_id suppress_tokens task_specific_params temperature tf_legacy_loss
tie_encoder_decoder tokenizer_class top_k top_p torch_dtype torchscript transformers_version transformers.js_config
typical_p unk_token_id use_bfloat16 use_cache
"""
HARMLESS = frozenset(_HARMLESS.split())


REFUSED = object()  # the meaning of null for an option that has no such value
_MOST = 2**31 - 1  # the largest size


class Options:
    """Reads the options of a config, or of a mapping inside of one (``under``).

    An absent option and a null one differ: an absent option has the default of the family's class, and null is a value,
    to which each call gives a meaning or which it refuses.
    """

    def __init__(self, raw: Mapping[str, Any], family: str, under: str = "", harmless: str = ""):
        self._raw, self.family, self._under = raw, family, under
        self._asked = set(HARMLESS | set(harmless.split()))

    def refuse(self, name: str, value: object, allowed: str) -> NoReturn:
        """Raise the UserError of one option."""
        given = "null" if value is None else repr(value)
        raise UserError(f"config.json of {self.family}: {self._under}{name}: given {given}, allowed: {allowed}")

    def take(self, *names: str, default: Any = None, null: Any = None) -> Any:
        """Return the value of an option: that of the first of its names that has one.

        If all that are there are null it is ``null``, and if none is there it is ``default``.
        """
        self._asked |= set(names)
        there = [self._raw[name] for name in names if name in self._raw]
        return next((value for value in there if value is not None), null if there else default)

    def _size(self, names: Sequence[str], default: Any, null: Any, kind: str) -> tuple[str, Any]:
        """Return (name, value) of a number, as ``take`` does. Two names of an option must not have different values."""
        value = self.take(*names, default=default, null=null)
        name = next((name for name in names if self._raw.get(name) is not None), names[0])
        if value is REFUSED:
            self.refuse(next(name for name in names if name in self._raw), None, kind)
        if value is None:
            raise UserError(f"config.json of {self.family}: {self._under}{names[0]} is missing")
        for other in names:
            if self._raw.get(other) not in (None, value):
                self.refuse(other, self._raw[other], f"{value!r}, as {name} has it")
        return name, value

    def count(self, *names: str, default: int | None = None, null: Any = REFUSED, low: int = 1) -> int:
        """Return the value of an option, a whole number of at least ``low``, under any of the option's names."""
        kind = f"a whole number from {low}"
        name, value = self._size(names, default, null, kind)
        whole = isinstance(value, (int, float)) and not isinstance(value, bool) and low <= value <= _MOST
        return int(value) if whole and value == int(value) else self.refuse(name, value, kind)

    def number(self, *names: str, default: float | None = None, null: Any = REFUSED) -> float:
        """Return the value of an option, a finite number, under any of the option's names."""
        name, value = self._size(names, default, null, "a number")
        finite = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e300
        return float(value) if finite else self.refuse(name, value, "a number")

    def flag(self, name: str, default: bool) -> bool:
        """Return the value of an option, True or False; null is False."""
        value = self.take(name, default=default, null=False)
        return value if isinstance(value, bool) else self.refuse(name, value, "true or false")

    def only(self, name: str, wanted: Any, why: str, *, null: bool | None = None) -> None:
        """Refuse every value of an option but ``wanted``, which is also the value of an absent option.

        Args:
          null: whether null counts as ``wanted``; None: it does if ``wanted`` is false.
        """
        value = self.take(name, default=wanted, null=wanted if (not wanted if null is None else null) else None)
        if value != wanted or isinstance(value, bool) != isinstance(wanted, bool):
            self.refuse(name, value, f"{wanted!r}: {why}")

    def choice(self, name: str, choices: Mapping[str, str], default: str) -> str:
        """Return what the value of an option, one of ``choices``, stands for."""
        value = self.take(name, default=default)
        known = isinstance(value, str) and value in choices
        return choices[value] if known else self.refuse(name, value, " or ".join(choices))

    def mapping(self, name: str) -> Mapping[str, Any]:
        """Return the value of an option, a mapping; it is empty for null or an absent option."""
        value = self.take(name, default={}, null={})
        return value if isinstance(value, Mapping) else self.refuse(name, value, "an object")

    def finish(self) -> None:
        """Refuse an option that was not asked for, unless it is switched off."""
        for name, value in self._raw.items():
            if name not in self._asked and value not in (None, False, 0, "", [], {}):
                self.refuse(
                    name, value, "nothing, for this decoder has no such option (remove it if it changes no logit)"
                )
