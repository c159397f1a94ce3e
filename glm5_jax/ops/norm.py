"""RMSNorm and LayerNorm. Statistics in float32; the result has the input's dtype."""

import jax
import jax.numpy as jnp


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
  """scale * x / sqrt(mean(x^2) + eps) over the last axis (arXiv 1910.07467).

  Like the reference implementation it rounds to the input's dtype before multiplying by `scale`.
  """
  x32 = x.astype(jnp.float32)
  inverse = jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
  return scale.astype(x.dtype) * (x32 * inverse).astype(x.dtype)


def layer_norm(x: jax.Array, scale: jax.Array, bias: jax.Array, eps: float) -> jax.Array:
  """LayerNorm over the last axis; GLM-5 uses it on the indexer's keys only."""
  x32 = x.astype(jnp.float32)
  centred = x32 - jnp.mean(x32, axis=-1, keepdims=True)
  inverse = jax.lax.rsqrt(jnp.mean(centred * centred, axis=-1, keepdims=True) + eps)
  return (centred * inverse * scale + bias).astype(x.dtype)
