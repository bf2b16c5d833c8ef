"""A config.json of somebody else, read option by option: what nobody asked for is refused, not passed over."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from mhc.errors import UserError

# Options that say nothing about the function from tokens to logits: training, generation, bookkeeping.
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


class Options:
    """The options of a config, or of a mapping inside of one (``under``)."""

    def __init__(self, raw: Mapping[str, Any], family: str, under: str = "", harmless: str = ""):
        self._raw, self.family, self._under = raw, family, under
        self._asked = set(HARMLESS | set(harmless.split()))

    def refuse(self, name: str, value: object, allowed: str) -> NoReturn:
        """Raises the UserError of one option."""
        raise UserError(f"config.json of {self.family}: {self._under}{name}: given {value!r}, allowed: {allowed}")

    def take(self, *names: str, default: Any = None) -> Any:
        """The value under the first of the names that has one; None counts as none."""
        self._asked |= set(names)
        return next((self._raw[name] for name in names if self._raw.get(name) is not None), default)

    def count(self, *names: str, default: int | None = None, low: int = 1) -> int:
        """A whole number from ``low``."""
        value = self.take(*names, default=default)
        if value is None:
            raise UserError(f"config.json of {self.family}: {self._under}{names[0]} is missing")
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value != int(value) or value < low:
            self.refuse(names[0], value, f"a whole number from {low}")
        return int(value)

    def number(self, *names: str, default: float | None = None) -> float:
        """A finite number."""
        value = self.take(*names, default=default)
        if value is None:
            raise UserError(f"config.json of {self.family}: {self._under}{names[0]} is missing")
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < float("inf"):
            self.refuse(names[0], value, "a number")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        """True or False."""
        value = self.take(name, default=default)
        return value if isinstance(value, bool) else self.refuse(name, value, "true or false")

    def only(self, name: str, wanted: Any, why: str) -> None:
        """Refuse every value but one; an absent option has it."""
        value = self.take(name, default=wanted)
        if value != wanted or isinstance(value, bool) != isinstance(wanted, bool):
            self.refuse(name, value, f"{wanted!r}: {why}")

    def choice(self, name: str, choices: Mapping[str, str], default: str) -> str:
        """What one of the choices stands for."""
        value = self.take(name, default=default)
        return choices[value] if value in choices else self.refuse(name, value, " or ".join(choices))

    def mapping(self, name: str) -> Mapping[str, Any]:
        """A mapping, empty where there is none."""
        value = self.take(name, default={})
        return value if isinstance(value, Mapping) else self.refuse(name, value, "an object")

    def finish(self) -> None:
        """Refuse an option that was not asked for, unless it is switched off."""
        for name, value in self._raw.items():
            if name not in self._asked and value not in (None, False, 0, "", [], {}):
                self.refuse(
                    name, value, "nothing, for this decoder has no such option (remove it if it changes no logit)"
                )
