"""One decoder layer: pre-norm residual attention, then pre-norm residual feed-forward."""

from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax

from glm5_jax.config import BlockSpec, ModelConfig
from glm5_jax.modules.attention import GQA, MLA, Cache, Context
from glm5_jax.modules.mlp import MoE, SwiGLU
from glm5_jax.modules.params import ones
from glm5_jax.ops import collectives, norm, sparse_attention


class Options(NamedTuple):
  """What a forward pass computes beside its output; static.

  indexer_loss adds the indexer's KL; recall the attention mass its selection holds; capture every
  intermediate, [T, S] tensors included (for tests and plots). `attend` computes MLA's attention:
  `sparse_attention.attend`, or what `kernels.attention` returns.
  """

  indexer_loss: bool = False
  recall: bool = False
  capture: bool = False
  form: sparse_attention.Form | None = None
  attend: Callable[..., Any] = sparse_attention.attend


class Block(nn.Module):
  """Attention and feed-forward of one layer, as `spec` says."""

  config: ModelConfig
  spec: BlockSpec
  options: Options
  emit_selection: bool = False

  @nn.compact
  def __call__(
    self, x: jax.Array, selection: sparse_attention.Shared | None, ctx: Context, cache: Cache
  ):
    """Returns (x, selection, aux, cache). `x` [B, T, D]; `selection` is what an earlier layer left.

    aux holds scalars kl and recall (mean over valid queries), router statistics, and with
    options.capture the intermediates.
    """
    c, options = self.config, self.options
    n = norm.rms_norm(x, ones(self, c, 'attn_norm', c.hidden_size), c.rms_norm_eps)
    with jax.named_scope('attention'):
      if self.spec.indexer == 'none':
        attended, aux, cache = GQA(c, name='attn')(n, ctx, cache)
      else:
        request = sparse_attention.Request(
          kl=options.indexer_loss, recall=options.recall, selection=self.emit_selection,
          scores=options.capture,
        )  # fmt: skip
        attention = MLA(c, self.spec.indexer, request, options.form, options.attend, name='attn')
        attended, aux, cache = attention(n, selection, ctx, cache)
    selection = aux.pop('selection', selection)
    aux |= {k: collectives.token_mean(aux[k], ctx.valid) for k in ('kl', 'recall') if k in aux}
    # Of heads, feed-forward width and experts a device may have a part, and its sum with it.
    attended = collectives.psum(attended, 'tensor')
    x = x + attended
    m = norm.rms_norm(x, ones(self, c, 'mlp_norm', c.hidden_size), c.rms_norm_eps)
    with jax.named_scope(self.spec.mlp):
      if self.spec.mlp == 'dense':
        y = SwiGLU(c, c.intermediate_size, name='mlp')(m)
      else:
        y, router_aux = MoE(c, options.capture, name='moe')(m, ctx.valid)
        aux |= router_aux
      y = collectives.psum(y, 'tensor')
    if options.capture:
      aux |= {'attn_in': n, 'attn_out': attended, 'mlp_out': y, 'block_out': x + y}
    return x + y, selection, aux, cache
