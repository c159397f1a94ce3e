"""Multi-token prediction (section 2.1, after DeepSeek-V3, arXiv 2412.19437, section 2.2).

Step k turns the previous hidden state of position t and the embedding of token t + k into a state that
predicts token t + k + 1. GLM-5 trains three steps that share the parameters of one layer
(num_nextn_predict_layers = 1); with as many layers as steps each step has its own.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

from glm5_jax.config import BlockSpec, ModelConfig
from glm5_jax.modules.attention import Context
from glm5_jax.modules.block import Block, Options
from glm5_jax.modules.params import declare, ones, rematerialised
from glm5_jax.ops import collectives, norm


class MTPLayer(nn.Module):
  """enorm, hnorm, eh_proj, one decoder layer, shared_head.norm (names of the checkpoint)."""

  config: ModelConfig
  options: Options

  @nn.compact
  def __call__(self, hidden: jax.Array, embedded: jax.Array, selection, ctx: Context):
    """One step on [B, T, D] arrays, in the form nn.scan wants: (carry, outputs).

    A `selection` of an earlier step is reused (GLM-5.2's index_share_for_mtp_iteration); None lets
    the layer's own indexer select.
    """
    c = self.config
    e = norm.rms_norm(embedded, ones(self, c, 'embed_norm', c.hidden_size), c.rms_norm_eps)
    h = norm.rms_norm(hidden, ones(self, c, 'hidden_norm', c.hidden_size), c.rms_norm_eps)
    w = declare(self, c, w_proj=(2 * c.hidden_size, c.hidden_size))['w_proj']
    z = jnp.einsum('BTC,CD->BTD', jnp.concatenate([e, h], axis=-1), w.astype(e.dtype))
    spec = c.mtp_block if selection is None else BlockSpec('moe', 'shared')
    emit = selection is None and c.index_share_for_mtp_iteration
    y, selection, aux, _ = Block(c, spec, self.options, emit, name='block')(z, selection, ctx, None)
    if self.options.capture:
      aux['mtp_in'] = z
    hidden = norm.rms_norm(y, ones(self, c, 'norm', c.hidden_size), c.rms_norm_eps)
    return hidden, (hidden, selection, aux)


def scanned(config: ModelConfig, options: Options, name: str, new: bool) -> nn.Module:
  """The MTP layers, stacked on a leading parameter axis.

  Called with [rounds, layers, B, T, D] embeddings it runs all layers one after another in each round;
  the rounds share the parameters. Only where these are `new` must flax trace a round twice, to see that
  they do not depend on it; interpreted kernels cannot be traced like that.
  """
  in_axes = (0, nn.broadcast, nn.broadcast)
  one_round = nn.scan(
    rematerialised(MTPLayer, config), variable_axes={'params': 0}, split_rngs={'params': True},
    in_axes=in_axes, out_axes=0,
    length=config.num_nextn_predict_layers, check_constancy_invariants=False,
  )  # fmt: skip
  rounds = nn.scan(
    one_round, variable_broadcast='params', split_rngs={'params': False}, in_axes=in_axes,
    out_axes=0, check_constancy_invariants=new,
  )  # fmt: skip
  return rounds(config, options, name=name)


def predict(layers: nn.Module, hidden: jax.Array, embedded: jax.Array, ctx: Context, steps: int):
  """Hidden states of `steps` further tokens, [steps, B, T, D], and aux with a leading step axis.

  Args:
    layers: from `scanned`.
    hidden: [B, T, D] main model state after the final norm.
    embedded: [B, T, D] embeddings of the input tokens; shifted here. Positions whose shifted token
      lies beyond the row or segment give values that the loss must not count.
    ctx: the main model's context; rope is relative, so positions need no shift.
    steps: a multiple of the number of layers.

  Raises:
    ValueError: if `steps` is no multiple of the number of layers.
  """
  depth = layers.config.num_nextn_predict_layers
  if not depth or steps % depth:
    raise ValueError(f'{steps} MTP steps cannot be made of {depth} layers; use a multiple')
  shifted = jnp.stack([_shift(embedded, k) for k in range(1, steps + 1)])
  shifted = shifted.reshape(-1, depth, *embedded.shape)
  share = layers.config.index_share_for_mtp_iteration and layers.config.attention == 'mla'
  if not share or steps == depth:
    _, (states, _, aux) = layers(hidden, shifted, None, ctx)
  else:
    hidden, (first, selections, first_aux) = layers(hidden, shifted[:1], None, ctx)
    _, (later, _, later_aux) = layers(
      hidden, shifted[1:], jax.tree.map(lambda a: a[0, 0], selections), ctx
    )
    states = jnp.concatenate([first, later])
    shared = {name: (a, later_aux[name]) for name, a in first_aux.items() if name in later_aux}
    aux = {name: jnp.concatenate(parts) for name, parts in shared.items()}
    # The indexer ran in the first round only.
    aux |= {name: a for name, a in first_aux.items() if name not in shared}
  aux = jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), aux)
  return states.reshape(-1, *hidden.shape), aux


def _shift(x: jax.Array, by: int) -> jax.Array:
  """x[:, t + by] at t; zeros past the end of the row, of which `x` may be a device's part."""
  return collectives.shift_sequence(x, min(by, x.shape[1]))
