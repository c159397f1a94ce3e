"""Dense causal attention over the heads' own keys and values, for the stages without selection.

The kernel is JAX's splash attention (jax.experimental.pallas.ops.tpu.splash_attention); this file gives
it packed rows of any length, of any head size, and of which a device may have a part.
"""

import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

from pallas_kernels.residuals import ATTENTION, STATISTICS

Implementation = Literal['reference', 'tpu']
LANES = 128
# Up to here one backward kernel computes all three gradients; it writes a partial dq for every block of
# keys. Beyond, dq has a kernel of its own, which computes the scores once more.
FUSED_KEYS = 8192


def _block_sizes(time: int, keys: int) -> splash.BlockSizes:
  """The largest blocks that divide a device's queries and all keys; `dense_mla` has padded them."""
  q, kv = (next(b for b in (1024, 512, 256, LANES) if n % b == 0) for n in (time, keys))
  fused = keys <= FUSED_KEYS
  return splash.BlockSizes(
    block_q=q, block_kv=kv, block_kv_compute=min(kv, 512), block_q_dkv=q, block_kv_dkv=kv,
    block_kv_dkv_compute=min(kv, 512), use_fused_bwd_kernel=fused,
    block_q_dq=None if fused else q, block_kv_dq=None if fused else kv,
  )  # fmt: skip


def _kernel(q: jax.Array, parts: int, part: Any, residuals: bool, interpret: bool):
  """Splash attention of the queries q [B, N, T, H], the `part`-th of a row's."""
  heads, time = q.shape[1:3]
  keys = time * parts
  mask = masks.CausalMask((keys, keys))
  mask.q_sequence = np.concatenate([slots(n, time, parts) for n in range(parts)])
  kernel = splash.make_splash_mha(
    masks.MultiHeadMask([mask] * heads),
    block_sizes=_block_sizes(time, keys), save_residuals=residuals, head_shards=1,
    q_seq_shards=parts, residual_checkpoint_name=None if residuals else ATTENTION,
    interpret=interpret,
  )  # fmt: skip
  if parts == 1:
    return kernel

  def own(a: jax.Array | None, axis: int) -> jax.Array | None:
    if a is None:
      return None
    size = a.shape[axis] // parts
    return jax.lax.dynamic_slice_in_dim(a, part * size, size, axis)

  def of_part(info):
    return info and info._replace(
      data_next=own(info.data_next, 1), mask_next=own(info.mask_next, 1),
      block_mask=own(info.block_mask, 1), q_sequence=own(info.q_sequence, 0),
    )  # fmt: skip

  infos = map(of_part, (kernel.fwd_mask_info, kernel.dq_mask_info, kernel.dkv_mask_info))
  return splash.SplashAttentionKernel(*infos, **kernel.kwargs)


def slots(part: Any, time: int, parts: int) -> Any:
  """[T] int32, where in its row each of the T = `time` queries of a part is: see `dense_mla`."""
  if parts == 1:
    return np.arange(time, dtype=np.int32)
  xp, chunk = (np if isinstance(part, int) else jnp), time // 2
  return xp.concatenate([
    n * chunk + xp.arange(chunk, dtype=np.int32) for n in (part, 2 * parts - 1 - part)
  ])  # fmt: skip


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def _with_lse(q, k, v, segments, part, parts, interpret):
  """Output and log-sum-exp of rows [B, N, ., H]; the latter has no gradient."""
  kernel = _kernel(q, parts, part, True, interpret)
  out, (lse,) = jax.vmap(kernel)(q, k, v, splash.SegmentIds(*segments))
  return out, lse


def _plain(q, k, v, segments, part, parts, interpret):
  kernel = _kernel(q, parts, part, False, interpret)
  return jax.vmap(kernel)(q, k, v, splash.SegmentIds(*segments))


def _with_lse_fwd(q, k, v, segments, part, parts, interpret):
  # Splash gives log-sum-exps or gradients, not both.
  _, lse = _with_lse(q, k, v, segments, part, parts, interpret)
  out, pull = jax.vjp(lambda q, k, v: _plain(q, k, v, segments, part, parts, interpret), q, k, v)
  return (out, lse), pull


def _with_lse_bwd(parts, interpret, pull, g):
  return *pull(g[0]), None, None


_with_lse.defvjp(_with_lse_fwd, _with_lse_bwd)


def dense_mla(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  q_segment: jax.Array,
  k_segment: jax.Array,
  scale: float,
  *,
  part: jax.Array | int = 0,
  want_lse: bool = False,
  implementation: Implementation = 'reference',
  interpret: bool = False,
) -> tuple[jax.Array, jax.Array | None]:
  """softmax(scale * q k^T) v over the visible keys.

  Key s is visible to a query if it is no later in the row and both carry the same segment id, above 0. The
  TPU kernel computes blocks of 1,024 x 1,024 on and below the diagonal, so nothing of size T * S exists;
  the reference makes all scores.

  Args:
    q: [B, T, N, H], a part of a row: all of it (S = T), or the `part`-th of C = S / T parts, which is of
      2 C equal chunks those numbered `part` and 2 C - 1 - `part`: as many visible keys as in any other.
    k, v: [B, S, N, H], [B, S, N, Hv], of the whole row.
    q_segment, k_segment: [B, T], [B, S] int32.
    scale: of the logits.
    part: which part of the row `q` is; may be traced (a device's index along `context`).
    want_lse: whether to return the log-sum-exp. With a gradient asked for as well it costs a second
      forward pass.
    implementation: 'reference' (plain jax) or 'tpu'.
    interpret: run the kernel on CPU, by an interpreter.

  Returns:
    [B, T, N, Hv], zero for queries of segment 0; and None or [B, T, N] float32, the log-sum-exp of the
    visible keys' scaled logits, without a gradient (undefined for segment 0).

  Raises:
    ValueError: shapes that disagree, or an unknown implementation.
  """
  batch, time, heads, dim = q.shape
  keys = k.shape[1]
  chunk = time // 2 if keys > time else time
  wrong = keys % time or (keys > time and time % 2)
  if wrong or k.shape != (batch, keys, heads, dim) or v.shape[:3] != k.shape[:3]:
    raise ValueError(
      f'dense_mla: q {q.shape}, k {k.shape}, v {v.shape}; expected q [B, T, N, H], k [B, S, N, H] '
      'and v [B, S, N, Hv], with T = S, or an even divisor of it'
    )
  if q_segment.shape != (batch, time) or k_segment.shape != (batch, keys):
    raise ValueError(
      f'dense_mla: segments {q_segment.shape} and {k_segment.shape}; expected {(batch, time)} and '
      f'{(batch, keys)}'
    )
  if implementation not in ('reference', 'tpu'):
    raise ValueError(f"dense_mla: implementation={implementation!r}; use 'reference' or 'tpu'")
  if implementation == 'reference':
    return _reference(q, k, v, q_segment, k_segment, scale, part, want_lse)

  def padded(x):  # Every chunk to whole blocks, with segment 0.
    x = x.reshape(batch, -1, chunk, *x.shape[2:])
    x = jnp.pad(x, [(0, 0), (0, 0), (0, -chunk % LANES)] + [(0, 0)] * (x.ndim - 3))
    return x.reshape(batch, -1, *x.shape[3:])

  def unpadded(x):  # [B, N, T, ...] of queries.
    x = jnp.swapaxes(x, 1, 2)
    x = x.reshape(batch, time // chunk, -1, *x.shape[2:])[:, :, :chunk]
    return x.reshape(batch, time, *x.shape[3:])

  def rows(x):  # [B, N, ., H] with whole lanes.
    x = jnp.pad(x, [(0, 0), (0, 0), (0, 0), (0, -x.shape[3] % LANES)])
    return jnp.swapaxes(padded(x), 1, 2)

  segments = padded(q_segment.astype(jnp.int32)), padded(k_segment.astype(jnp.int32))
  arguments = rows(q * scale), rows(k), rows(v), segments, part, keys // time, interpret
  if want_lse:
    out, lse = _with_lse(*arguments)
    lse = checkpoint_name(unpadded(lse), STATISTICS)
  else:
    out, lse = _plain(*arguments), None
  out = unpadded(out)[..., : v.shape[3]]
  return jnp.where((q_segment > 0)[:, :, None, None], out, 0), lse


def _reference(q, k, v, q_segment, k_segment, scale, part, want_lse):
  time, keys = q.shape[1], k.shape[1]
  slot = jnp.asarray(slots(part, time, keys // time))
  same = (q_segment[:, :, None] == k_segment[:, None, :]) & (q_segment > 0)[:, :, None]
  visible = (same & (jnp.arange(keys) <= slot[:, None]))[:, None]
  dtype = jnp.promote_types(q.dtype, jnp.float32)
  logits = jnp.einsum('BTNH,BSNH->BNTS', q, k, preferred_element_type=dtype) * scale
  lse = jax.nn.logsumexp(logits, axis=-1, where=visible)
  probs = jnp.where(visible, jnp.exp(logits - jnp.where(jnp.isfinite(lse), lse, 0)[..., None]), 0)
  out = jnp.einsum('BNTS,BSNH->BTNH', probs.astype(v.dtype), v)
  return out, jax.lax.stop_gradient(jnp.swapaxes(lse, 1, 2)) if want_lse else None
