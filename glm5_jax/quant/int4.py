"""INT4 weights, symmetric, with a scale for each group of inputs of an output.

  s = bfloat16(max |w| / 7), at least 1e-5,    q = round(w / s) in -7..7,    w^ = q s

Section 2.4.1 has quantisation-aware training in INT4 during SFT, by the very kernel that quantises for
inference; group size, symmetry and the matrices it names not. Ours are the choices of public recipes:
symmetric, groups of 32 or 128, the experts only. That the scale is a bfloat16 is our own: then q s needs
11 bits of mantissa, so w^ is exact in float32, and quantising it once more changes nothing.
"""

import dataclasses
import functools
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from glm5_jax.optim.rules import MUON_RULES, parse_layout, path_name, rule_of

GROUPS = (32, 128)
EXPERTS = 'experts/w_(gate|up|down)'
_MOST = 7
_SMALLEST = 1e-5


class Quantised(NamedTuple):
  """A matrix in INT4.

  Attributes:
    q: int8 in -7..7, the matrix's own shape.
    scale: bfloat16, the same with the inputs' axes replaced by one of their groups.
  """

  q: jax.Array
  scale: jax.Array


@functools.partial(jax.jit, static_argnames=('axes', 'group'))
def quantise(w: jax.Array, axes: tuple[int, ...], group: int) -> Quantised:
  """The one function that training and export share.

  Args:
    w: a matrix, or a stack of them, of any float type; computed in float32.
    axes: adjacent ones that together are the inputs of an output.
    group: how many inputs share a scale; divides their number.
  """
  grouped = _group(w.astype(jnp.float32), axes, group)
  inputs = axes[0] + 1
  largest = jnp.max(jnp.abs(grouped), axis=inputs, keepdims=True)
  scale = jnp.maximum(largest / _MOST, _SMALLEST).astype(jnp.bfloat16)
  # A scale that was rounded down leaves the largest weight just above 7.
  q = jnp.clip(jnp.round(grouped / scale.astype(jnp.float32)), -_MOST, _MOST)
  return Quantised(q.astype(jnp.int8).reshape(w.shape), jnp.squeeze(scale, inputs))


@functools.partial(jax.jit, static_argnames=('axes', 'group'))
def dequantise(quantised: Quantised, axes: tuple[int, ...], group: int) -> jax.Array:
  """q s in float32, exactly. Arguments as `quantise`."""
  grouped = _group(quantised.q, axes, group).astype(jnp.float32)
  scale = jnp.expand_dims(quantised.scale, axes[0] + 1).astype(jnp.float32)
  return (grouped * scale).reshape(quantised.q.shape)


def rounded(w: jax.Array, axes: tuple[int, ...], group: int) -> jax.Array:
  """w^: what is left of `w` after INT4, float32."""
  return dequantise(quantise(w, axes, group), axes, group)


def _group(x: jax.Array, axes: tuple[int, ...], group: int) -> jax.Array:
  """[.., inputs, ..] -> [.., groups, group, ..]; the inputs may be several adjacent axes."""
  first, last = axes[0], axes[-1]
  return x.reshape(*x.shape[:first], -1, group, *x.shape[last + 1 :])


def pack(q: np.ndarray) -> np.ndarray:
  """int8 [.., n] -> uint8 [.., n / 2]: two's complement nibbles, the even index in the low one."""
  nibbles = np.asarray(q).view(np.uint8) & 15
  return nibbles[..., 0::2] | (nibbles[..., 1::2] << 4)


def unpack(packed: np.ndarray) -> np.ndarray:
  """The inverse of `pack`."""
  nibbles = np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1)
  return (nibbles.astype(np.int8) ^ 8) - 8


@dataclasses.dataclass(frozen=True)
class Int4:
  """What is quantised, and how finely.

  Attributes:
    group: inputs that share a scale, one of GROUPS.
    parameters: a pattern; it must match a parameter's whole path, or its end after a '/'.
  """

  group: int = 32
  parameters: str = EXPERTS

  def __post_init__(self):
    if self.group not in GROUPS:
      raise ValueError(f'optim.int4_group={self.group} is none of {list(GROUPS)}')
    try:
      re.compile(self.parameters)
    except re.error as e:
      raise ValueError(f'optim.int4_parameters={self.parameters!r} is no pattern: {e}') from None

  def covers(self, path: str) -> bool:
    """Whether the parameter at `path` ('moe/block0/moe/experts/w_up') is quantised."""
    return re.fullmatch(rf'(.*/)?({self.parameters})', path) is not None

  def axes(self, path: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The axes of a covered parameter that are its inputs.

    Raises:
      ValueError: it is no matrix, or its inputs do not divide into groups.
    """
    rule = rule_of(path, MUON_RULES)
    if '->' not in rule:
      raise ValueError(
        f'optim.int4_parameters={self.parameters!r} names {path}, which is no matrix of a layer'
      )
    axes = parse_layout(rule, len(shape)).rows
    inputs = int(np.prod([shape[i] for i in axes]))
    if inputs % self.group:
      raise ValueError(
        f'{path} has {inputs} inputs, which groups of optim.int4_group={self.group} do not divide'
      )
    return axes

  def check(self, params: Any) -> None:
    """That `params` (arrays or `jax.ShapeDtypeStruct`s) can be quantised so.

    Raises:
      ValueError: nothing is named, or something that cannot be.
    """
    found = jax.tree_util.tree_leaves_with_path(params)
    covered = {path_name(path): x for path, x in found if self.covers(path_name(path))}
    if not covered:
      raise ValueError(
        f'optim.int4_parameters={self.parameters!r} matches no parameter of this model'
      )
    for path, x in covered.items():
      self.axes(path, x.shape)
      if x.dtype != jnp.float32:
        raise ValueError(f'{path} is {x.dtype}; INT4 training needs model.param_dtype=float32')
