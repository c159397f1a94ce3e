"""Sparse multi-head latent attention over a per-query selection of cached rows, with gradients."""

import dataclasses
import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from pallas_kernels.residuals import ATTENTION
from pallas_kernels.sparse_mla import (
  kernel_backward,
  kernel_forward,
  kernel_lists,
  layout,
  reference,
)
from pallas_kernels.sparse_mla.stream import LOG2_E, Blocks
from pallas_kernels.tuning import best_blocks

Implementation = Literal['reference', 'tpu']
Regime = Literal['dense', 'gather']

# Keys up to which the masked-dense regime is used; see `sparse_mla`.
DENSE_KEYS = 8192


@dataclasses.dataclass(frozen=True)
class Tuning:
  """Block sizes of one pass: queries of a block, queries of one matmul, keys of a chunk."""

  queries: int = 8
  together: int = 4
  keys: int = 512
  # Gradient rows are summed beside matmuls, see kernel_backward.py.
  sum_beside: bool = dataclasses.field(default=False, kw_only=True)

  def __post_init__(self):
    if self.queries > layout.MAX_QUERIES_PER_BLOCK or self.queries % self.together:
      raise ValueError(
        f'queries must be a multiple of together and at most {layout.MAX_QUERIES_PER_BLOCK}, got '
        f'{self.queries} and {self.together}'
      )


def tuned(blocks: tuple[int, ...]) -> Tuning:
  """An entry of the tuning table: three sizes, and 1 behind them for `sum_beside`."""
  return Tuning(*blocks[:3], sum_beside=blocks[3:] == (1,))


@dataclasses.dataclass(frozen=True)
class Config:
  """Static arguments of the TPU implementation."""

  scale: float
  latent_dim: int
  regime: Regime
  forward: Tuning
  backward: Tuning
  cores: int = 1  # TensorCores of a device: 2 where it is a whole v5p chip.
  # Queries of one kernel call, all sequences together: bounds the memory of lists and padded
  # copies.
  span: int = 8192
  interpret: Any = False


_CORES = {'v5p': 2, 'v6e': 1, 'tpu7x': 1}


def chip_name() -> str:
  """'v5p', 'v6e' or 'tpu7x': the mesh's or the first device's; of others, the nearest."""
  # A mesh may be of devices to compile for, of which this machine has none.
  device = jax.sharding.get_abstract_mesh().abstract_device or jax.devices()[0]
  kind = device.device_kind.lower()
  if 'v5p' in kind or kind == 'tpu v5':
    return 'v5p'
  return 'tpu7x' if '7' in kind else 'v6e'


def cores(chip: str | None = None) -> int:
  """TensorCores of a device of this chip; None asks the mesh, or the first device."""
  return _CORES[chip or chip_name()]


def _blocks(c: Config, tuning: Tuning, heads: int, width: int, dtype) -> Blocks:
  latent = layout.round_up(c.latent_dim, layout.LANES)
  return Blocks(
    queries=tuning.queries,
    heads=layout.round_up(heads, 16),
    keys=tuning.keys,
    latent=latent,
    features=latent + layout.round_up(width - c.latent_dim, layout.LANES),
    together=tuning.together,
    gather=c.regime == 'gather',
    cores=c.cores,
    scale=c.scale,
    dtype=jnp.dtype(dtype),
    interpret=bool(c.interpret),
    sum_beside=tuning.sum_beside,
  )


def _padded_time(time: int, b: Blocks) -> int:
  """Query blocks are dealt evenly to the cores."""
  return layout.round_up(time, b.queries * b.cores)


def _rows(x: jax.Array, b: Blocks, width: int) -> jax.Array:
  """[B, T, N, x] -> [G * M * N, width] in blocks, zeros added."""
  x = layout.pad_to(x, 1, _padded_time(x.shape[1], b))
  return layout.pad_to(layout.pad_to(x, 2, b.heads), 3, width).reshape(-1, width)


def _per_row(x: jax.Array, b: Blocks) -> jax.Array:
  """[B, T, N] -> [G, 1, M * N], zeros added."""
  x = layout.pad_to(layout.pad_to(x, 1, _padded_time(x.shape[1], b)), 2, b.heads)
  return x.reshape(-1, 1, b.rows)


def _unrows(x: jax.Array, batch: int, time: int, heads: int, b: Blocks) -> jax.Array:
  return x.reshape(batch, -1, b.heads, x.shape[-1])[:, :time, :heads]


def _sequence_keys(size: int, b: Blocks) -> int:
  return layout.round_up(size, b.keys)


def _keys(latents: jax.Array, c: Config, b: Blocks) -> jax.Array:
  """Latents as the kernels read them: packed rows (gathered) or padded sequences (dense)."""
  batch, size, _ = latents.shape
  keys = layout.pad_features(latents, c.latent_dim)
  if c.regime == 'gather':
    # Rows behind the last are what the filler of the lists names.
    keys = layout.pad_to(keys.reshape(batch * size, -1), 0, batch * size + b.keys)
    return layout.pack_rows(keys)
  return layout.pad_to(keys, 1, _sequence_keys(size, b)).reshape(-1, b.features)


def _selection(indices: jax.Array, size: int, c: Config, b: Blocks) -> dict[str, Any]:
  """Keyword arguments of the kernels that say which of `size` keys each query block reads."""
  batch = indices.shape[0]
  indices = layout.pad_to(indices, 1, _padded_time(indices.shape[1], b), -1)
  sequence = jnp.arange(batch, dtype=jnp.int32)
  if c.regime == 'gather':
    rows = jnp.where(indices >= 0, indices + sequence[:, None, None] * size, -1)
    lists, masks, counts = kernel_lists.row_lists(
      rows.reshape(-1, indices.shape[2]), b.queries, b.keys, batch * size, b.interpret
    )
    lists = lists.reshape(lists.shape[0], -1, 1, b.keys)
    starts = base = jnp.zeros_like(counts)
  else:
    padded, lists = _sequence_keys(size, b), None
    masks, starts, counts = layout.dense_masks(indices, b.queries, b.keys, padded)
    base = jnp.repeat(sequence * padded, counts.shape[0] // batch)
  masks = masks.reshape(masks.shape[0], -1, 1, b.keys)
  return {'lists': lists, 'masks': masks, 'starts': starts, 'counts': counts, 'base': base}


def _span(batch: int, time: int, c: Config) -> int:
  """Queries of a sequence in one kernel call: a divisor of `time`, which saves a padded copy of
  all."""
  most = min(time, max(1, c.span // batch))
  step = 16 if most % 16 == 0 else 1
  divisors = [n for n in range(most // 4 // step * step, most + 1, step) if n and time % n == 0]
  return max(divisors, default=most)


def _spans(x: jax.Array, c: Config) -> jax.Array:
  """[B, T, ...] -> [spans, B, span, ...]: what one kernel call takes."""
  batch, time = x.shape[:2]
  span = _span(batch, time, c)
  count = -(-time // span)
  fill = -1 if jnp.issubdtype(x.dtype, jnp.integer) else 0
  x = layout.pad_to(x, 1, count * span, fill).reshape(batch, count, span, *x.shape[2:])
  return jnp.moveaxis(x, 1, 0)


def _unspans(x: jax.Array, time: int) -> jax.Array:
  x = jnp.moveaxis(x, 0, 1)
  return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :time]


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def attend(q, latents, indices, c: Config):
  """`sparse_mla` by the TPU kernels, arguments checked."""
  batch, time, heads, width = q.shape
  b = _blocks(c, c.forward, heads, width, q.dtype)
  keys = _keys(latents, c, b)

  def one_span(inputs):
    q, indices = inputs
    span = q.shape[1]
    with jax.named_scope('sparse_mla_selection'):
      selection = _selection(indices, latents.shape[1], c, b)
    rows = _rows(layout.pad_features(q, c.latent_dim), b, b.features)
    out, lse = kernel_forward.forward(rows, keys=keys, **selection, blocks=b, interpret=c.interpret)
    out = _unrows(out, batch, span, heads, b)[..., : c.latent_dim]
    return out, lse.reshape(batch, -1, b.heads)[:, :span, :heads]

  out, lse = lax.map(one_span, (_spans(q, c), _spans(indices, c)))
  return _unspans(out, time), _unspans(lse, time)


def _forward_rule(q, latents, indices, c: Config):
  out, lse = checkpoint_name(attend(q, latents, indices, c), ATTENTION)
  return (out, lse), (q, latents, indices, out, lse)


def attend_backward(c: Config, residuals, cotangents):
  """Gradients of `attend` for q and latents from (q, latents, indices, out, lse)."""
  q, latents, indices, out, lse = residuals
  dout, dlse = cotangents
  batch, time, heads, width = q.shape
  size = latents.shape[1]
  b = _blocks(c, c.backward, heads, width, q.dtype)
  keys = _keys(latents, c, b)

  def one_span(sums, inputs):
    q, indices, out, dout, lse, dlse = inputs
    with jax.named_scope('sparse_mla_selection'):
      selection = _selection(indices, size, c, b)
    delta = jnp.sum(dout.astype(jnp.float32) * out.astype(jnp.float32), axis=-1) - dlse
    any_key = lse > -jnp.inf
    dq, sums = kernel_backward.backward(
      _rows(layout.pad_features(q, c.latent_dim), b, b.features),
      _rows(dout, b, b.latent),
      _per_row(jnp.where(any_key, lse * LOG2_E, 0.0), b),
      _per_row(jnp.where(any_key, delta, 0.0), b),
      keys=keys,
      sums=sums,
      **selection,
      sequence_keys=_sequence_keys(size, b),
      blocks=b,
      interpret=c.interpret,
    )
    dq = _unrows(dq, batch, q.shape[1], heads, b)
    return sums, layout.unpad_features(dq, c.latent_dim, width - c.latent_dim)

  spans = [_spans(x, c) for x in (q, indices, out, dout, lse, dlse)]
  sums, dq = lax.scan(one_span, kernel_backward.zero_sums(keys.shape[0], b), tuple(spans))
  dkeys = jnp.sum(sums.reshape(b.cores, keys.shape[0], b.features), axis=0)
  if b.gather:
    dkeys = dkeys[: batch * size]
  dkeys = dkeys.reshape(batch, -1, b.features)[:, :size]
  dlatents = layout.unpad_features(dkeys, c.latent_dim, width - c.latent_dim)
  return _unspans(dq, time), dlatents.astype(latents.dtype), None


attend.defvjp(_forward_rule, attend_backward)


def choose_regime(keys: int) -> Regime:
  """Masked-dense while it pays and a sequence's gradients fit in VMEM; see `sparse_mla`."""
  return 'dense' if keys <= DENSE_KEYS else 'gather'


def make_config(
  scale: float,
  latent_dim: int,
  keys: int,
  regime: Regime | None = None,
  chip: str | None = None,
  forward: Tuning | None = None,
  backward: Tuning | None = None,
  span: int = 8192,
  interpret: Any = False,
) -> Config:
  """Static arguments with what is None chosen by chip and number of keys."""
  chip = chip or chip_name()
  regime = regime or choose_regime(keys)
  if chip not in _CORES or regime not in ('dense', 'gather'):
    raise ValueError(
      f"expected chip to be one of {sorted(_CORES)} and regime 'dense' or 'gather', got {chip!r} "
      f'and {regime!r}'
    )

  def best(direction):
    return tuned(best_blocks(chip, 'sparse_mla', regime, direction))

  return Config(
    scale=float(scale),
    latent_dim=latent_dim,
    regime=regime,
    forward=forward or best('forward'),
    backward=backward or best('backward'),
    cores=_CORES[chip],
    span=span,
    interpret=interpret,
  )


def _check(q, latents, indices, latent_dim: int) -> None:
  if q.ndim != 4 or latents.ndim != 3 or indices.ndim != 3:
    raise ValueError(
      'expected q [B, T, N, L + R], latents [B, S, L + R], indices [B, T, K], got '
      f'{q.shape}, {latents.shape}, {indices.shape}'
    )
  if q.shape[0] != latents.shape[0] or q.shape[:2] != indices.shape[:2]:
    raise ValueError(
      f'batch and time differ: q {q.shape}, latents {latents.shape}, indices {indices.shape}'
    )
  if q.shape[3] != latents.shape[2] or not 0 < latent_dim < q.shape[3]:
    raise ValueError(
      f'q and latents must share L + R > latent_dim, got {q.shape[3]}, {latents.shape[2]} and '
      f'latent_dim {latent_dim}'
    )
  if indices.dtype != jnp.int32:
    raise ValueError(f'indices must be int32, got {indices.dtype}')
  if q.dtype != latents.dtype:
    raise ValueError(f'q and latents must have one dtype, got {q.dtype} and {latents.dtype}')


def sparse_mla(
  q: jax.Array,
  latents: jax.Array,
  indices: jax.Array,
  scale: float,
  latent_dim: int,
  *,
  implementation: Implementation = 'reference',
  regime: Regime | None = None,
  chip: str | None = None,
  forward: Tuning | None = None,
  backward: Tuning | None = None,
  span: int = 8192,
  interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
  """Absorbed attention of every query to its selected rows.

    p[t, n, :] = softmax_{s in indices[t]}(scale * q[t, n] . latents[s])
    out[t, n] = sum_s p[t, n, s] latents[s, :L]

  The selection already holds causality and segments: a key that is not in `indices` does not exist.
  Differentiable in `q` and `latents`, through `out` and through `lse`; all sums are float32 and in
  a fixed order, so repeated runs agree to the bit.

  The TPU kernels work on blocks of neighbouring queries, whose selections are read as one union:

  * masked-dense ('dense'): all keys between the first and the last selected one, contiguously,
    under the selection as one bit a key. Cost grows with the visible keys.
  * gathered ('gather'): only the rows of the union U, one copy each. Cost grows with U, which is
    between K and min(M K, S) for blocks of M queries, and so never above the visible keys.

  By the compiler's schedules masked-dense wins while the visible keys n are below 1.15 U / 1.57 U
  / 1.70 U forward and 1.04 U / 1.08 U / 1.07 U backward (v5p / v6e / tpu7x). A causal sequence has
  n = S / 2 on average: S up to 4K-7K if the selections of a block coincide, 9K-14K if U = 2 K. None
  chooses masked-dense up to S = DENSE_KEYS = 8,192, where the gradients of all keys fit in VMEM.
  docs/kernels_sparse_mla.md has the roofline and the measurements.

  Args:
    q: [B, T, N, L + R] queries with W_UK absorbed: latent part, then rotated part.
    latents: [B, S, L + R] compressed key-values, then the rotated key; same dtype as q.
    indices: [B, T, K] int32 positions in [0, S), ascending, none twice, padded with -1.
    scale: softmax scale, 1/16 in GLM-5.
    latent_dim: L; the value is the first L of a row.
    implementation: 'reference' (plain jax) or 'tpu' (bfloat16 or float32).
    regime: 'dense', 'gather' or None to choose by S.
    chip: 'v5p', 'v6e' or 'tpu7x', to choose block sizes; None asks the mesh, or the first device.
    forward, backward: block sizes in place of the chip's.
    span: queries of one kernel call, all sequences together; bounds the memory of lists and copies.
    interpret: passed to pallas_call, for instance pltpu.InterpretParams() on CPU.

  Returns:
    out [B, T, N, L] in q's dtype, and lse [B, T, N] float32, the log of the softmax's denominator
    with the scaled logits in nats. A query without keys gives 0 and -inf.

  Raises:
    ValueError: shapes or dtypes that do not fit, said in the message.
  """
  _check(q, latents, indices, latent_dim)
  if implementation == 'reference':
    return reference.sparse_mla(q, latents, indices, scale, latent_dim)
  if implementation != 'tpu':
    raise ValueError(f"implementation must be 'reference' or 'tpu', got {implementation!r}")
  if q.dtype not in (jnp.bfloat16, jnp.float32):
    raise ValueError(f'the TPU kernels take bfloat16 or float32, got {q.dtype}')
  if latents.shape[0] * latents.shape[1] * layout.MAX_QUERIES_PER_BLOCK >= 2**31:
    raise ValueError(f'at most 2^27 rows of latents in one call, got {latents.shape[:2]}')
  config = make_config(
    scale, latent_dim, latents.shape[1], regime, chip, forward, backward, span, interpret
  )
  return attend(q, latents, indices, config)
