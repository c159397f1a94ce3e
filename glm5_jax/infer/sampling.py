"""Sampling: penalties, temperature, top-k, top-p, min-p, and a seed per request.

Each row of a batch has its own settings. The order is that of Hugging Face's generate: repetition and
presence penalties on the logits, temperature, then top-k, top-p (of what top-k left) and min-p. All
three keep a prefix of the tokens in descending order of probability, ties by the lower id, so together
they keep the shortest of the three.

The noise of a token depends on the request's seed, the sample's number and the token's position, and on
nothing else: the same request draws the same noise in any batch. Its logits agree up to the rounding of
float32 only, because a batch of another size is summed in another order; a token may differ where two
candidates lie that close.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

IN_CONTEXT, GENERATED = 1, 2  # Bits of `seen`: anywhere so far; among the generated tokens.


class Settings(NamedTuple):
  """How to sample each of B rows. Arrays of [B], or of host values in `Request`."""

  temperature: jax.Array  # float32; 0 takes the most probable token.
  top_k: jax.Array  # int32; 0 is off.
  top_p: jax.Array  # float32 in (0, 1]; 1 is off.
  min_p: jax.Array  # float32 in [0, 1), relative to the most probable token; 0 is off.
  repetition: jax.Array  # float32 > 0; 1 is off (arXiv 1909.05858, section 4.1).
  presence: jax.Array  # float32, subtracted from the logits of generated tokens; 0 is off.
  seed: jax.Array  # [B, 2] uint32, high word first
  sample: jax.Array  # int32: which of a request's n samples
  position: jax.Array  # int32: of the token to be drawn, in the sequence


class Drawn(NamedTuple):
  """One token a row."""

  token: jax.Array  # [B] int32
  logprob: jax.Array  # [B] float32, nats, of the distribution sampled from; 0 at temperature 0.
  raw_logprob: jax.Array  # [B] float32, nats, of softmax(logits) as the model gave them


def penalised(logits: jax.Array, seen: jax.Array, settings: Settings) -> jax.Array:
  """[B, V] logits after the repetition and presence penalties; `seen` [B, V] uint8 bits."""
  repetition, presence = settings.repetition[:, None], settings.presence[:, None]
  scaled = jnp.where(logits > 0, logits / repetition, logits * repetition)
  logits = jnp.where(seen & IN_CONTEXT > 0, scaled, logits)
  return logits - jnp.where(seen & GENERATED > 0, presence, 0.0)


def _filtered(logits: jax.Array, settings: Settings) -> jax.Array:
  """[B, V] logits with -inf for what top-k, top-p and min-p exclude."""
  size = logits.shape[-1]
  order = jnp.argsort(-logits, axis=-1, stable=True)
  descending = jnp.take_along_axis(logits, order, axis=-1)
  rank = jnp.arange(size)
  k = jnp.where(settings.top_k > 0, jnp.minimum(settings.top_k, size), size)
  within_k = rank < k[:, None]
  probs = jax.nn.softmax(jnp.where(within_k, descending, -jnp.inf), axis=-1)
  before = jnp.cumsum(probs, axis=-1) - probs
  # Rounding in the sum must not cut a token where top-p is off.
  within_p = (before < settings.top_p[:, None]) | (settings.top_p[:, None] >= 1)
  within_min = descending >= descending[:, :1] + jnp.log(settings.min_p)[:, None]
  kept = jnp.sum(jnp.cumprod(within_k & within_p & within_min, axis=-1), axis=-1)
  last = jnp.maximum(kept, 1)[:, None] - 1
  threshold = jnp.take_along_axis(descending, last, axis=-1)
  last_id = jnp.take_along_axis(order, last, axis=-1)
  keep = (logits > threshold) | ((logits == threshold) & (rank <= last_id))
  return jnp.where(keep, logits, -jnp.inf)


def log_distribution(logits: jax.Array, settings: Settings, seen: jax.Array | None) -> jax.Array:
  """[B, V] log-probabilities that tokens are drawn from; a point mass at temperature 0.

  Args:
    logits: [B, V] float32.
    settings: of each row.
    seen: [B, V] uint8, bits IN_CONTEXT and GENERATED; None if no row has a penalty.
  """
  if seen is not None:
    logits = penalised(logits, seen, settings)
  greedy = settings.temperature <= 0
  scaled = logits / jnp.where(greedy, 1.0, settings.temperature)[:, None]
  any_filter = (settings.top_k > 0) | (settings.top_p < 1) | (settings.min_p > 0)
  filtered = jax.lax.cond(
    jnp.any(any_filter & ~greedy), lambda x: _filtered(x, settings), lambda x: x, scaled
  )
  logp = jax.nn.log_softmax(filtered, axis=-1)
  best = jnp.argmax(logits, axis=-1)[:, None] == jnp.arange(logits.shape[-1])
  return jnp.where(greedy[:, None], jnp.where(best, 0.0, -jnp.inf), logp)


def keys(settings: Settings, purpose: int = 0) -> jax.Array:
  """[B] random keys: fold_in of seed, sample and position; `purpose` tells several draws apart."""

  def key(seed, sample, position):
    key = jax.random.wrap_key_data(seed, impl='threefry2x32')
    return jax.random.fold_in(jax.random.fold_in(key, 8 * sample + purpose), position)

  return jax.vmap(key)(settings.seed, settings.sample, settings.position)


def draw(logp: jax.Array, keys: jax.Array) -> jax.Array:
  """[B] tokens from [B, V] log-probabilities (Gumbel-max); a point mass is drawn as such."""
  noise = jax.vmap(lambda key: jax.random.gumbel(key, logp.shape[-1:], jnp.float32))(keys)
  return jnp.argmax(logp + noise, axis=-1).astype(jnp.int32)


def sample(logits: jax.Array, settings: Settings, seen: jax.Array | None = None) -> Drawn:
  """Draws a token for each row of `logits` [B, V]; arguments as for `log_distribution`."""
  logits = logits.astype(jnp.float32)
  with jax.named_scope('sample'):
    logp = log_distribution(logits, settings, seen)
    token = jax.lax.cond(
      jnp.all(settings.temperature <= 0),  # Noise for a whole vocabulary costs more than the rest.
      lambda: jnp.argmax(logp, axis=-1).astype(jnp.int32),
      lambda: draw(logp, keys(settings)),
    )
    raw = jax.nn.log_softmax(logits, axis=-1)
    at = token[:, None]
    return Drawn(
      token,
      jnp.take_along_axis(logp, at, axis=-1)[:, 0],
      jnp.take_along_axis(raw, at, axis=-1)[:, 0],
    )


def top_logprobs(logits: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
  """The most probable tokens of softmax(logits), best first, ties by the lower id.

  Args:
    logits: [B, V], as the model gave them.
    count: K; static.

  Returns:
    Ids [B, K] int32 and their log-probabilities [B, K] float32 in nats; V of them where V < K.
  """
  logits = logits.astype(jnp.float32)
  _, ids = jax.lax.top_k(logits, min(count, logits.shape[-1]))
  return ids, jnp.take_along_axis(jax.nn.log_softmax(logits, axis=-1), ids, axis=-1)


def stack(rows: Sequence[tuple], size: int) -> Settings:
  """Settings of `rows`, each (temperature, top_k, ..., position) of host values, padded to `size`."""
  floats, integers = np.float32, np.int32
  dtypes = (floats, integers, floats, floats, floats, floats, np.uint64, integers, integers)
  off = (0.0, 0, 1.0, 0.0, 1.0, 0.0, 0, 0, 0)
  padded = [*rows, *[off] * (size - len(rows))]
  columns: list[Any] = [
    np.array(c, t) for c, t in zip(zip(*padded, strict=True), dtypes, strict=True)
  ]
  seed = columns[6]
  words = np.stack([seed >> np.uint64(32), seed & np.uint64(0xFFFFFFFF)], axis=-1)
  columns[6] = words.astype(np.uint32)
  return Settings(*columns)
