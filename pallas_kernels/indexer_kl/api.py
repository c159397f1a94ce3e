"""The loss that trains the lightning indexer: KL from the attention to the index distribution.

arXiv 2512.02556 section 2.1, both stages; GLM-5, arXiv 2602.15763, section 2.1.1.
"""

import dataclasses
import functools
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from pallas_kernels.indexer_kl import kernel_backward, kernel_forward, layout, reference
from pallas_kernels.indexer_kl.reference import Visible
from pallas_kernels.indexer_kl.tiles import Sizes
from pallas_kernels.residuals import STATISTICS
from pallas_kernels.sparse_mla import api as sparse
from pallas_kernels.sparse_mla.layout import LANES, pad_to, round_up
from pallas_kernels.sparse_mla.stream import LOG2_E, Blocks
from pallas_kernels.tuning import best_blocks

Implementation = Literal['reference', 'tpu']


@dataclasses.dataclass(frozen=True)
class Tuning(sparse.Tuning):
  """Block sizes of one pass; `unit` is the keys of one matmul, a divisor of `keys`."""

  unit: int = 512

  def __post_init__(self):
    super().__post_init__()
    if self.queries & (self.queries - 1) or self.keys % self.unit:
      raise ValueError(
        f'queries must be a power of two and keys a multiple of unit, got {self.queries}, '
        f'{self.keys} and {self.unit}'
      )


# Keys up to which the sparse stage is masked-dense as well; see `indexer_kl`.
DENSE_KEYS = 16_384


def _fit(t: Tuning, keys: int) -> Tuning:
  """Chunks no longer than the sequence."""
  size = min(t.keys, round_up(keys, LANES))
  return dataclasses.replace(t, keys=size, unit=math.gcd(t.unit, size))


def make_config(
  scale: float,
  width: int,
  keys: int,
  regime: sparse.Regime | None = None,
  chip: str | None = None,
  forward: Tuning | None = None,
  backward: Tuning | None = None,
  span: int = 8192,
  interpret: Any = False,
) -> sparse.Config:
  """Static arguments with what is None chosen by chip and number of keys."""
  regime = regime or ('dense' if keys <= DENSE_KEYS else 'gather')
  chip = chip or sparse.chip_name()

  def best(direction):
    return _fit(Tuning(*best_blocks(chip, 'indexer_kl', regime, direction)), keys)

  return sparse.make_config(
    scale, width, keys, regime, chip, forward or best('forward'), backward or best('backward'),
    span, interpret,
  )  # fmt: skip


def make_sizes(c: sparse.Config, tuning: sparse.Tuning, q: jax.Array, index_q: jax.Array) -> Sizes:
  """Heads are padded until those of a block's queries fill whole lane tiles."""
  assert isinstance(tuning, Tuning)
  tile = max(1, LANES // tuning.queries)
  width, index_dim = (round_up(x.shape[3], LANES) for x in (q, index_q))
  blocks = Blocks(
    queries=tuning.queries,
    heads=round_up(q.shape[2], tile),
    keys=tuning.keys,
    latent=width,
    features=width + index_dim,
    together=tuning.together,
    gather=c.regime == 'gather',
    cores=c.cores,
    scale=c.scale,
    dtype=q.dtype,
    interpret=bool(c.interpret),
  )
  return Sizes(
    blocks=blocks,
    width=width,
    heads=q.shape[2],
    index_heads=round_up(index_q.shape[2], tile),
    index_dim=index_dim,
    unit=tuning.unit,
  )


def query_arguments(s: Sizes, q, lse, index_q, weights) -> dict[str, jax.Array]:
  """What both kernels read of a span's queries; no probability where there is no head or key."""
  b = s.blocks
  time = sparse._padded_time(q.shape[1], b)

  def rows(x, heads, width):
    return layout.heads_first(pad_to(x, 3, width), b.queries, time, heads).reshape(-1, width)

  def row(x, heads, fill):
    x = layout.heads_first(x, b.queries, time, heads, fill)
    return x.reshape(-1, 1, heads * b.queries)

  return {
    'q': rows(q, b.heads, s.width),
    'lse': row(jnp.where(lse > -jnp.inf, lse * LOG2_E, 1e30), b.heads, 1e30),
    'index_q': rows(index_q, s.index_heads, s.index_dim),
    'weights': row(weights, s.index_heads, 0.0),
  }


def selection_arguments(selection: jax.Array | Visible, size: int, c: sparse.Config, s: Sizes):
  """Keyword arguments of the kernels that say which of `size` keys each query block reads."""
  b = s.blocks
  if not isinstance(selection, Visible):
    return sparse._selection(selection, size, c, b)
  time = sparse._padded_time(selection.q_slot.shape[1], b)
  padded = sparse._sequence_keys(size, b)
  masks, starts, counts = layout.visible_masks(
    Visible(
      pad_to(selection.q_slot, 1, time),
      pad_to(selection.q_segment, 1, time),
      pad_to(selection.k_segment, 1, padded),
    ),
    b,
  )
  sequence = jnp.arange(selection.k_segment.shape[0], dtype=jnp.int32)
  return {
    'lists': None,
    'masks': masks.reshape(masks.shape[0], -1, 1, b.keys),
    'starts': starts,
    'counts': counts,
    'base': jnp.repeat(sequence * padded, counts.shape[0] // sequence.shape[0]),
  }


def backward_keys(latents, index_k, s: Sizes) -> tuple[jax.Array | None, jax.Array]:
  """`keys` and the first `sums` of the backward kernel."""
  keys = layout.keys(latents, index_k, s.blocks, layout.FILLER)
  return None if s.blocks.gather else keys, kernel_backward.zero_sums(keys, s)


def backward_selection(selection: jax.Array | Visible, size: int, c: sparse.Config, s: Sizes):
  """`selection_arguments` as the backward kernel takes them."""
  found = selection_arguments(selection, size, c, s)
  if not s.blocks.gather:
    return found
  assert not isinstance(selection, Visible)
  lists, masks, counts = (found[name] for name in ('lists', 'masks', 'counts'))
  return found | layout.keep_apart(lists, masks, counts, selection.shape[0] * size, c.cores)


def _spans(selection: jax.Array | Visible, c: sparse.Config):
  """Per-query parts of the selection in spans, and what puts a span's back together."""
  if isinstance(selection, Visible):
    k_segment = selection.k_segment
    parts = sparse._spans(selection.q_slot, c), sparse._spans(selection.q_segment, c)
    return parts, lambda parts: Visible(parts[0], parts[1], k_segment)
  return sparse._spans(selection, c), lambda part: part


def _per_query(x: jax.Array, batch: int, time: int, s: Sizes) -> jax.Array:
  """A row of the forward kernel's result, [G, 128], as [B, T]."""
  return x[:, : s.blocks.queries].reshape(batch, -1)[:, :time]


@functools.partial(jax.custom_vjp, nondiff_argnums=(7,))
def loss(q, latents, lse, index_q, weights, index_k, selection, c: sparse.Config) -> jax.Array:
  """`indexer_kl` by the TPU kernels, arguments checked."""
  return forward_rule(q, latents, lse, index_q, weights, index_k, selection, c)[0]


def forward_rule(q, latents, lse, index_q, weights, index_k, selection, c: sparse.Config):
  """The KL, and what `backward_rule` needs."""
  batch, time = q.shape[:2]
  size = latents.shape[1]
  s = make_sizes(c, c.forward, q, index_q)
  keys = layout.keys(latents, index_k, s.blocks)
  chosen, together = _spans(selection, c)

  def one_span(inputs):
    *queries, chosen = inputs
    with jax.named_scope('indexer_kl_selection'):
      arguments = selection_arguments(together(chosen), size, c, s)
    stats = kernel_forward.forward(
      **query_arguments(s, *queries), keys=keys, **arguments, sizes=s, interpret=c.interpret
    )
    rows = kernel_forward.KL, kernel_forward.INDEX_LSE, kernel_forward.MASS
    return [_per_query(stats[:, row], batch, queries[0].shape[1], s) for row in rows]

  spans = *(sparse._spans(x, c) for x in (q, lse, index_q, weights)), chosen
  kl, index_lse, mass = (sparse._unspans(x, time) for x in lax.map(one_span, spans))
  index_lse, mass = (checkpoint_name(x, STATISTICS) for x in (index_lse, mass))
  return kl, (q, latents, lse, index_q, weights, index_k, selection, index_lse, mass)


def backward_rule(c: sparse.Config, residuals, cotangent):
  """Gradients of the index side; None for everything else."""
  q, latents, lse, index_q, weights, index_k, selection, index_lse, mass = residuals
  batch, time, index_heads, dim = index_q.shape
  size = latents.shape[1]
  s = make_sizes(c, c.backward, q, index_q)
  b = s.blocks
  keys, zeros = backward_keys(latents, index_k, s)
  rows = batch * (size if b.gather else sparse._sequence_keys(size, b))
  chosen, together = _spans(selection, c)

  def one_span(sums, inputs):
    *queries, per_query, chosen = inputs
    with jax.named_scope('indexer_kl_selection'):
      arguments = backward_selection(together(chosen), size, c, s)
    padded = sparse._padded_time(per_query.shape[1], b)
    per_query = pad_to(per_query, 1, padded)
    d_q, d_weights, sums = kernel_backward.backward(
      **query_arguments(s, *queries),
      per_query=layout.per_query([per_query[..., i] for i in range(3)], b.queries),
      keys=keys,
      sums=sums,
      **arguments,
      sizes=s,
      interpret=c.interpret,
    )
    span = queries[0].shape[1]
    d_q = layout.heads_last(d_q, batch, b.queries, s.index_heads)
    d_weights = layout.heads_last(d_weights.reshape(-1, 1), batch, b.queries, s.index_heads)
    d_q = d_q[:, :span, :index_heads, :dim].astype(index_q.dtype)
    return sums, (d_q, d_weights[:, :span, :index_heads, 0])

  # In the order of kernel_backward's rows.
  per_query = jnp.stack([cotangent, index_lse * LOG2_E, cotangent * mass], axis=-1)
  spans = *(sparse._spans(x, c) for x in (q, lse, index_q, weights, per_query)), chosen
  sums, (d_q, d_weights) = lax.scan(one_span, zeros, spans)
  d_k = (
    kernel_backward.total(sums, rows, s)
    .reshape(batch, -1, s.index_dim)[:, :size, :dim]
    .astype(index_k.dtype)
  )
  d_q, d_weights = (sparse._unspans(x, time) for x in (d_q, d_weights))
  return None, None, None, d_q, d_weights, d_k, None


loss.defvjp(forward_rule, backward_rule)


def _check(q, latents, lse, index_q, index_weights, index_k, selection, implementation) -> None:
  batch, time, heads, width = q.shape
  size, index_heads, dim = latents.shape[1], index_q.shape[2], index_q.shape[3]
  wanted = {
    'latents': (latents, (batch, size, width)),
    'lse': (lse, (batch, time, heads)),
    'index_q': (index_q, (batch, time, index_heads, dim)),
    'index_weights': (index_weights, (batch, time, index_heads)),
    'index_k': (index_k, (batch, size, dim)),
  }
  if isinstance(selection, Visible):
    wanted |= {
      'q_slot': (selection.q_slot, (batch, time)),
      'q_segment': (selection.q_segment, (batch, time)),
      'k_segment': (selection.k_segment, (batch, size)),
    }
  else:
    wanted['indices'] = (selection, (batch, time, selection.shape[-1]))
  for name, (x, shape) in wanted.items():
    if x.shape != shape:
      raise ValueError(
        f'indexer_kl: {name} has shape {x.shape}, expected {shape} beside q {q.shape}'
      )
  integers = selection if isinstance(selection, Visible) else (selection,)
  if any(x.dtype != jnp.int32 for x in integers):
    raise ValueError(
      'indexer_kl: positions and segments must be int32, got '
      + ', '.join(str(x.dtype) for x in integers)
    )
  if implementation not in ('reference', 'tpu'):
    raise ValueError(f"indexer_kl: implementation={implementation!r}; use 'reference' or 'tpu'")
  dtypes = {x.dtype for x in (q, latents, index_q, index_k)}
  if implementation == 'tpu' and dtypes not in ({jnp.dtype('bfloat16')}, {jnp.dtype('float32')}):
    raise ValueError(
      'indexer_kl: the TPU kernels take q, latents, index_q and index_k all in bfloat16 or all in '
      f'float32, got {", ".join(sorted(map(str, dtypes)))}'
    )


def indexer_kl(
  q: jax.Array,
  latents: jax.Array,
  lse: jax.Array,
  index_q: jax.Array,
  index_weights: jax.Array,
  index_k: jax.Array,
  selection: jax.Array | Visible,
  scale: float,
  *,
  implementation: Implementation = 'reference',
  regime: sparse.Regime | None = None,
  chip: str | None = None,
  forward: Tuning | None = None,
  backward: Tuning | None = None,
  span: int = 8192,
  interpret: Any = False,
) -> jax.Array:
  """KL from attention to the index distribution over each query's keys S_t, in nats.

    target[t, s] = mean over heads n of exp(scale * q[t, n] . latents[s] - lse[t, n])
    score[t, s] = sum over index heads i of index_weights[t, i] * relu(index_q[t, i] . index_k[s])
    kl[t] = sum over s in S_t of target (log target - log softmax_s(score))

  S_t is the selection (sparse stage) or every visible key (dense warm-up). The gradient reaches the
  index side only. Nothing of size T * S * N is ever made: the kernels compute target and scores in
  tiles, forward and once more backward; all sums are float32 and in a fixed order, so repeated runs
  agree to the bit. The plain jax takes a bounded number of queries at a time.

  The TPU kernels read the keys like `sparse_mla`: masked-dense ('dense') or, in the sparse stage,
  gathered ('gather'). By the compiler's schedules the gathered backward wins once the visible keys
  exceed 1.21 U / 1.99 U / 2.02 U (v5p / v6e / tpu7x) for a union U of 16 queries; None gathers above
  S = DENSE_KEYS = 16,384. docs/kernels_kl.md has the roofline and the measurements.

  Args:
    q, latents: [B, T, N, L + R], [B, S, L + R] as `sparse_mla` takes them.
    lse: [B, T, N] float32, log-sum-exp over S_t of the scaled logits, as `sparse_mla` returns it.
    index_q, index_weights, index_k: as `indexer_topk` takes them: [B, T, I, J], [B, T, I],
      [B, S, J].
    selection: [B, T, K] int32 positions in [0, S), ascending, none twice, padded with -1; or
      `Visible`, all visible keys.
    scale: softmax scale, 1/16 in GLM-5.
    implementation: 'reference' (plain jax) or 'tpu' (bfloat16 or float32).
    regime, chip, forward, backward, span: as in `sparse_mla`; `Visible` is always masked-dense.
    interpret: passed to pallas_call, for instance pltpu.InterpretParams() on CPU.

  Returns:
    [B, T] float32; 0 for a query without keys.

  Raises:
    ValueError: shapes or dtypes that do not fit, said in the message.
  """
  _check(q, latents, lse, index_q, index_weights, index_k, selection, implementation)
  index_weights = index_weights.astype(jnp.float32)
  q, latents, lse = lax.stop_gradient((q, latents, lse))
  arguments = q, latents, lse, index_q, index_weights, index_k, selection
  if implementation == 'reference':
    return reference.indexer_kl(*arguments, scale)
  if isinstance(selection, Visible):
    if regime == 'gather':
      raise ValueError("indexer_kl: regime='gather' needs a selection; all visible keys are dense")
    regime = 'dense'
  config = make_config(
    scale, q.shape[3], latents.shape[1], regime, chip, forward, backward, span, interpret
  )
  return loss(*arguments, config)
