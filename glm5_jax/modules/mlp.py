"""Feed-forward modules: the dense SwiGLU of the first layers, and the mixture of experts."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from glm5_jax.config import ModelConfig
from glm5_jax.modules.params import declare, weight
from glm5_jax.ops import collectives, dispatch, expert_parallel, router


class SwiGLU(nn.Module):
  """down(silu(gate x) * up x)."""

  config: ModelConfig
  width: int

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    d = self.config.hidden_size
    p = declare(
      self, self.config, w_gate=(d, self.width), w_up=(d, self.width), w_down=(self.width, d)
    )
    gate = jnp.einsum('...D,DF->...F', x, p['w_gate'].astype(x.dtype))
    up = jnp.einsum('...D,DF->...F', x, p['w_up'].astype(x.dtype))
    return jnp.einsum('...F,FD->...D', jax.nn.silu(gate) * up, p['w_down'].astype(x.dtype))


class Router(nn.Module):
  """Gate matrix and correction bias, both float32 always; the bias is moved by the balancing rule."""

  config: ModelConfig

  @nn.compact
  def __call__(self, x_TD: jax.Array) -> router.Routing:
    c = self.config
    normal = nn.initializers.normal(c.initializer_range)
    w = weight(self, 'w', normal, (c.hidden_size, c.n_routed_experts), jnp.float32)
    bias = self.param('bias', nn.initializers.zeros, (c.n_routed_experts,), jnp.float32)
    return router.route(x_TD, w, bias, c)


class Experts(nn.Module):
  """The routed experts' weights, stacked on a leading expert axis.

  Returns their output and, where several devices divide them, how many pairs these had no room for.
  """

  config: ModelConfig

  @nn.compact
  def __call__(
    self, x_TD: jax.Array, routing: router.Routing
  ) -> tuple[jax.Array, jax.Array | None]:
    c = self.config
    e, d, f = c.n_routed_experts, c.hidden_size, c.moe_intermediate_size
    # Wide, for gradients of grouped products in float32.
    p = declare(self, c, True, w_gate=(e, d, f), w_up=(e, d, f), w_down=(e, f, d))
    weights = p['w_gate'], p['w_up'], p['w_down']
    if collectives.present('expert'):
      return expert_parallel.expert_ffn(x_TD, routing, *weights, c)
    return dispatch.expert_ffn(x_TD, routing, *weights, c.expert_matmul), None


class MoE(nn.Module):
  """Routed experts plus the shared expert, which every token uses unscaled."""

  config: ModelConfig
  capture: bool

  @nn.compact
  def __call__(self, x: jax.Array, valid: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
    """`x` [B, T, D], `valid` [B, T] bool. Returns the output and router statistics."""
    c = self.config
    batch = x.shape[0]
    x_TD, valid = x.reshape(-1, c.hidden_size), valid.reshape(-1)
    with jax.named_scope('router'):
      routing = Router(c, name='router')(x_TD)
    y, dropped = Experts(c, name='experts')(x_TD, routing)
    y = y.reshape(x.shape)
    if c.n_shared_experts:
      y = y + SwiGLU(c, c.moe_intermediate_size * c.n_shared_experts, name='shared')(x)
    aux = {
      'load': router.load(routing, valid, c.n_routed_experts),
      'balance_loss': router.balance_loss(routing, valid, batch, c),
    }
    if dropped is not None:
      aux['dropped'] = dropped
    if self.capture:
      aux |= {
        'router_logits': routing.logits, 'router_experts': routing.experts,
        'router_weights': routing.weights,
      }  # fmt: skip
    return y, aux
