"""Test the validation loss: weighted by tokens, over the whole set, whatever the size of its batches."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from mhc.config import Config
from mhc.data import pipeline
from mhc.data.tokenizers import load
from mhc.model.decoder import DecoderDefinition
from mhc.sharding import put_batch
from tests.small import LENGTH, random_params, small, trainer

# Bytes of the documents in order. With begin and end each is one target longer, so that rows of 16 are filled without
# cutting a document in two: 8 + 8, 16, 8 + 8, 16, 8 and padding.
SIZES = (7, 7, 15, 7, 7, 15, 7)


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> tuple[Config, list[bytes]]:
    folder = tmp_path_factory.mktemp("documents")
    rng = np.random.default_rng(0)
    texts = [bytes(rng.integers(97, 123, size).tolist()) for size in SIZES]
    for number, text in enumerate(texts):
        (folder / f"{number}.txt").write_bytes(text)
    data = {
        "source": f"text:{folder}/2.txt",  # of no interest here
        "validation": f"text:{folder}/*.txt",
        "cache_dir": str(folder / "cache"),
        "sequence_length": LENGTH,
    }
    return small("plain", model={"vocab_size": load("bytes").vocab_size}, data=data), texts


def validated(config: Config, params: Any, batch_size: int) -> dict[str, float]:
    made = trainer(config)
    sums = {"nll": 0.0, "weight": 0.0, "bytes": 0.0}
    batches = pipeline.validation_batches(config.data, load("bytes"), batch_size=batch_size, batches=0)
    for batch in batches:
        parts = jax.device_get(made.validate(params, put_batch(batch, made.mesh)))
        sums = {name: sums[name] + float(parts[name]) for name in sums}
    return sums


def test_it_equals_a_direct_sum_over_unpadded_documents(documents):
    config, texts = documents
    params, tokenizer = random_params(config), load("bytes")
    definition = DecoderDefinition(config)
    run = jax.jit(lambda params, tokens: definition.bind(params)(tokens))
    nll = 0.0
    for text in texts:
        tokens = np.asarray([tokenizer.bos_id, *text, tokenizer.eos_id], np.int32)
        logits = np.asarray(run(params, tokens[None, :-1]), np.float64)[0]
        log_z = np.log(np.sum(np.exp(logits - logits.max(-1, keepdims=True)), -1)) + logits.max(-1)
        nll += np.sum(log_z - logits[np.arange(len(tokens) - 1), tokens[1:]])
    sums = validated(config, params, batch_size=2)
    assert sums["weight"] == sum(SIZES) + len(SIZES)  # every byte and every end
    assert sums["bytes"] == sum(SIZES)
    assert sums["nll"] == pytest.approx(nll, rel=1e-6)


def test_it_does_not_depend_on_the_batch_size(documents):
    config, _ = documents
    params = random_params(config)
    two, three = (validated(config, params, batch_size) for batch_size in (2, 3))
    assert (two["weight"], two["bytes"]) == (three["weight"], three["bytes"])
    assert three["nll"] == pytest.approx(two["nll"], rel=1e-6)


def test_a_mean_of_batch_means_would_be_another_number(documents):
    """The last batch is padded, so the two numbers differ; otherwise the tests above would pass with either."""
    config, _ = documents
    params, made = random_params(config), trainer(config)
    batches = list(pipeline.validation_batches(config.data, load("bytes"), batch_size=2, batches=0))
    parts = [jax.device_get(made.validate(params, put_batch(batch, made.mesh))) for batch in batches]
    assert len({float(part["weight"]) for part in parts}) > 1
    means = np.mean([part["nll"] / part["weight"] for part in parts])
    total = validated(config, params, 2)
    assert abs(means / (total["nll"] / total["weight"]) - 1) > 1e-4
