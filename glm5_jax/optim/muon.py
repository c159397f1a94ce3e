"""Muon: the update is the momentum, matrix by matrix, with all its singular values moved close to 1.

Muon (Jordan, 2024) in the form of Moonlight (Liu et al., arXiv 2502.16982), which GLM-4.5 and GLM-5
train with. Muon Split (section 2.1 of the paper) is a choice of what counts as a matrix: one head of
W_UQ, W_UK or W_UV instead of all heads side by side, so that heads can move at different scales. The
choice is a row of the table in optim/rules.py.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from glm5_jax.optim import distribute
from glm5_jax.optim.rules import MUON_SPLIT_RULES, Rules, label_params, layouts, parse_layout

# s -> a s + b s^3 + c s^5 on every singular value s.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
STEPS = 5
# Elements; fits a core's cache: on two CPU cores 1.5 times as fast as everything at once. An
# accelerator wants more, say 2**27.
CHUNK = 1 << 18


def newton_schulz(
  x: jax.Array, *, steps: int = STEPS, dtype: str = 'float32', eps: float = 1e-8
) -> jax.Array:
  """Moves the singular values of every matrix close to 1: U S V^T -> about U V^T.

  X / |X|_F, then `steps` times X <- a X + (b A + c A A) X with A = X X^T. Of 5 steps,
  singular values above 0.0015 |X|_F end between 0.68 and 1.21 (above 0.01 |X|_F below 1.14), smaller
  ones 485 times as large or less, and zero stays zero.

  Args:
    x: [K, rows, cols], rows <= cols (otherwise A is larger than it needs to be).
    dtype: of the factors and the result; 'float32' is meant literally, also on a TPU.
    eps: added to the norm.
  """
  a, b, c = COEFFICIENTS
  precision = jax.lax.Precision.HIGHEST if dtype == 'float32' else None
  dot = functools.partial(jnp.einsum, precision=precision, preferred_element_type=jnp.float32)
  x = x.astype(jnp.float32)
  x /= jnp.sqrt(jnp.sum(x * x, axis=(1, 2), keepdims=True)) + eps

  # Sums in float32, rounded once for the next product: in bfloat16 half the error.
  def step(x, _):
    gram = dot('kij,klj->kil', x, x)
    square = dot('kij,kjl->kil', gram.astype(dtype), gram.astype(dtype))
    polynomial = (b * gram + c * square).astype(dtype)
    return (a * x.astype(jnp.float32) + dot('kij,kjl->kil', polynomial, x)).astype(dtype), None

  return jax.lax.scan(step, x.astype(dtype), length=steps)[0]


def newton_schulz_flops(params: Any, rules: Rules, steps: int = STEPS) -> int:
  """FLOPs of the products in one update of all of `params` (arrays or `jax.ShapeDtypeStruct`).

  A step on a matrix of m x n, m <= n, costs 2 m^2 (2 n + m). Padding is not counted.
  """
  total = 0
  labels = label_params(params, rules)
  for rule, x in zip(jax.tree.leaves(labels), jax.tree.leaves(params), strict=True):
    if '->' in rule:
      count, rows, cols = parse_layout(rule, len(x.shape)).matrices(x.shape)
      m, n = min(rows, cols), max(rows, cols)
      total += steps * count * 2 * m * m * (2 * n + m)
  return total


class MuonState(NamedTuple):
  """Steps taken, and the momentum: the parameters' tree, shapes, dtypes and shardings."""

  steps: jax.Array  # int32
  mu: Any


def scale_by_muon(
  rules: Rules = MUON_SPLIT_RULES,
  *,
  momentum: float = 0.95,
  nesterov: bool = True,
  update_rms: float = 0.2,
  ns_dtype: str = 'float32',
  ns_chunk: int = CHUNK,
) -> optax.GradientTransformation:
  """Gradients -> update_rms * sqrt(max(rows, cols)) * newton_schulz(momentum), matrix by matrix.

  The factor (Moonlight, eq. 4) gives an update of full rank a root mean square of about `update_rms`,
  that of AdamW, so that both share a learning rate. Which axes form a matrix is the rules' matter; all
  leaves must have a rule of the form 'QNH->N,Q,H'. Sharded leaves are processed without redundancy
  (optim/distribute.py).

  Args:
    rules: path pattern -> rule.
    momentum: decay of the averaged gradient.
    nesterov: look one step ahead, with bias correction as in `optax.contrib.muon`. The paper is
      silent; public implementations do it.
    update_rms: 0.2 in GLM-4.5 and GLM-5.
    ns_dtype: 'float32' or 'bfloat16', of Newton-Schulz and of what is sent between devices.
    ns_chunk: elements that Newton-Schulz works on at once on a device; bounds the memory.

  Raises:
    ValueError: from init and update, for a leaf that has no such rule.
  """

  def init(params):
    layouts(params, rules)  # Bad rules should not wait for the first step.
    return MuonState(jnp.zeros((), jnp.int32), optax.tree.zeros_like(params))

  def update(grads, state, params=None):
    del params
    count = optax.safe_increment(state.steps)
    mu = optax.tree.update_moment(grads, state.mu, momentum, 1)
    if nesterov:
      ahead = optax.tree.bias_correction(mu, momentum, optax.safe_increment(count))
      now = optax.tree.bias_correction(grads, momentum, count)
      direction = jax.tree.map(lambda m, g: momentum * m + (1 - momentum) * g, ahead, now)
    else:
      direction = optax.tree.bias_correction(mu, momentum, count)
    leaves, tree = jax.tree.flatten(direction)
    found = layouts(direction, rules)
    orthogonalize = functools.partial(newton_schulz, dtype=ns_dtype)
    with jax.named_scope('newton_schulz'):
      updates = distribute.map_matrices(
        orthogonalize, [x.astype(ns_dtype) for x in leaves], found, chunk=ns_chunk
      )
    updates = [
      update_rms * math.sqrt(max(layout.matrices(x.shape)[1:])) * u.astype(x.dtype)
      for u, x, layout in zip(updates, leaves, found, strict=True)
    ]
    return jax.tree.unflatten(tree, updates), MuonState(count, mu)

  return optax.GradientTransformation(init, update)
