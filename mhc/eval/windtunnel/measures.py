"""Measure how far a model's distribution is from the exact posterior: in entropy, in KL divergence, in support.

An entropy alone can be right on the wrong support, and a mean of entropies can be right although no sequence is. So the
error of entropy is taken for each sequence and place, and stands beside the divergence and the total variation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from mhc.data.windtunnel import entropy_bits

if TYPE_CHECKING:
    from jaxtyping import Float64

_BIT = np.log(2.0)  # nats


class Distances(NamedTuple):
    """Holds distances between a model and the posterior of each sequence at each supervised place, float64 [B, P].

    Attributes:
        entropy_error: |H_model − H_Bayes|, bits.
        kl: KL(Bayes ‖ model) = Σ_c p_c log2(p_c / q_c), bits.
        total_variation: ½ Σ_c |p_c − q_c|, and half of what the model puts on ids that are no class; 0 … 1.
        cross_entropy: −Σ_c p_c log q_c, nats: what training lowers, and what the posterior's entropy bounds from below.
    """

    entropy_error: np.ndarray
    kl: np.ndarray
    total_variation: np.ndarray
    cross_entropy: np.ndarray


def distances(log_probabilities: np.ndarray, posterior: np.ndarray, first_class: int) -> Distances:
    """Return how far a model is from the posterior.

    Args:
        log_probabilities: float64 [B, P, V]: of the model, nats, over all its V outputs.
        posterior: float64 [B, P, C]: of the C classes, which are the outputs ``first_class`` … ``first_class + C − 1``.

    Raises:
        ValueError: the shapes do not fit.
    """
    classes = posterior.shape[-1]
    if log_probabilities.shape[:-1] != posterior.shape[:-1] or first_class + classes > log_probabilities.shape[-1]:
        raise ValueError(
            f"log_probabilities {log_probabilities.shape} and posterior {posterior.shape} from class {first_class} on: "
            "expected [B, P, V] and [B, P, C] with first_class + C ≤ V"
        )
    every = np.exp(log_probabilities)
    inside = slice(first_class, first_class + classes)
    outside = 1.0 - every[..., inside].sum(axis=-1)
    seen = posterior > 0
    cross = -np.sum(np.where(seen, posterior * np.where(seen, log_probabilities[..., inside], 0.0), 0.0), axis=-1)
    model_entropy = -np.sum(np.where(every > 0, every * np.where(every > 0, log_probabilities, 0.0), 0.0), axis=-1)
    truth = entropy_bits(posterior)
    return Distances(
        entropy_error=np.abs(model_entropy / _BIT - truth),
        kl=cross / _BIT - truth,
        total_variation=0.5 * (np.abs(posterior - every[..., inside]).sum(axis=-1) + np.maximum(outside, 0.0)),
        cross_entropy=cross,
    )


def optimum(posterior: Float64[np.ndarray, "B P C"]) -> float:
    """Return the cross-entropy of the posterior itself in nats: no model does better on these sequences."""
    return float(entropy_bits(posterior).mean() * _BIT)


def without_context(posterior: Float64[np.ndarray, "B P C"]) -> Distances:
    """Return the distances of the best predictor that sees no context: the mean posterior of each place.

    A control that does better than this sees context, by a leak.
    """
    mean = posterior.mean(axis=0, keepdims=True)
    with np.errstate(divide="ignore"):
        log_mean = np.broadcast_to(np.log(mean), posterior.shape)
    return distances(log_mean, posterior, 0)
