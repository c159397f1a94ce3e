"""Plain batch generation: one prefill, then one token at a time over the latent cache."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from glm5_jax.config import ModelConfig
from glm5_jax.modules.model import forward, init_cache, unembed


def generate(
  params: Any,
  prompts: Sequence[Sequence[int]],
  *,
  config: ModelConfig,
  max_new_tokens: int,
  temperature: float = 1.0,
  seed: int = 0,
) -> list[list[int]]:
  """Continues each prompt; returns the new ids, cut after the first of `config.eos_token_id`.

  Args:
    params: model parameters.
    prompts: token ids, none empty; they may differ in length.
    config: the model.
    max_new_tokens: how many tokens at most.
    temperature: of sampling; 0 takes the most probable token.
    seed: same prompts, seed and weights give the same tokens.

  Raises:
    ValueError: for an empty prompt, an id outside the vocabulary, or a prompt that leaves no room in
      `config.max_position_embeddings`.
  """
  for i, prompt in enumerate(prompts):
    if not len(prompt):
      raise ValueError(f'prompt {i} is empty; generation needs at least one token')
    if min(prompt) < 0 or max(prompt) >= config.vocab_size:
      raise ValueError(f'prompt {i} has ids outside 0..{config.vocab_size - 1}')
    if len(prompt) + max_new_tokens > config.max_position_embeddings:
      raise ValueError(
        f'prompt {i} of {len(prompt)} tokens and {max_new_tokens} new ones exceed'
        f' max_position_embeddings={config.max_position_embeddings}'
      )
  longest = max(len(p) for p in prompts)
  tokens = np.zeros((len(prompts), longest), np.int32)
  segments = np.zeros_like(tokens)
  for row, prompt in enumerate(prompts):  # Left padding: all rows end together.
    tokens[row, longest - len(prompt) :] = prompt
    segments[row, longest - len(prompt) :] = 1
  positions = np.maximum(np.cumsum(segments, axis=1) - 1, 0)
  new = np.asarray(
    _generate(
      params, tokens, positions, segments, jax.random.key(seed), jnp.float32(temperature),
      config=config, max_new_tokens=max_new_tokens,
    )
  )  # fmt: skip
  return [_cut(row.tolist(), config.eos_token_id) for row in new]


def _cut(ids: list[int], stops: tuple[int, ...]) -> list[int]:
  for i, token in enumerate(ids):
    if token in stops:
      return ids[: i + 1]
  return ids


@functools.partial(jax.jit, static_argnames=('config', 'max_new_tokens'))
def _generate(params, tokens, positions, segments, key, temperature, *, config, max_new_tokens):
  """[B, max_new_tokens] ids."""

  def sample(logits, key):
    drawn = jax.random.categorical(key, logits / jnp.maximum(temperature, 1e-6))
    return jnp.where(temperature > 0, drawn, jnp.argmax(logits, axis=-1)).astype(jnp.int32)

  cache = init_cache(config, tokens.shape[0], tokens.shape[1] + max_new_tokens)
  out = forward(
    params, tokens, config=config, positions=positions, segment_ids=segments, cache=cache,
    logits=False,
  )  # fmt: skip
  token = sample(unembed(params, out.hidden[:, -1]), jax.random.fold_in(key, 0))

  def step(carry, i):
    token, position, cache = carry
    out = forward(
      params, token[:, None], config=config, positions=position[:, None], cache=cache, logits=False
    )
    following = sample(unembed(params, out.hidden[:, -1]), jax.random.fold_in(key, i))
    return (following, position + 1, out.cache), token

  carry = (token, positions[:, -1] + 1, out.cache)
  (last, _, _), ids = jax.lax.scan(step, carry, jnp.arange(1, max_new_tokens))
  return jnp.concatenate([ids.T, last[:, None]], axis=1)
