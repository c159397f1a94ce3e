"""The map between a Hugging Face checkpoint and our parameter tree, as one table.

One `Rule` per parameter of a layer says how one checkpoint tensor holds it, in named dimensions:

    Rule('attn/w_uk', 'L N nope', 'self_attn.kv_b_proj.weight', 'N.nope+v L')

reads: `w_uk` has shape [L, N, nope]; the checkpoint's `kv_b_proj` has shape [N * (nope + v), L],
its rows being head-major (`.` splits an axis) and each head holding its key part before its value
part (`+` concatenates, and the parameter is the part that it names). `{E}` in a name counts
experts, which are stacked on our side only. Loading, saving and all checks are derived from this
table, for the two model types `glm_moe_dsa` and `deepseek_v32`.

Nothing here allocates an array: shapes and names only.
"""

import dataclasses
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from glm5_jax.config import ModelConfig

SEPARATOR = '/'
# Which tensors a checkpoint may hold in addition, as copies of others: see `copies`.
_MTP_COPIES = {
  'embed_tokens.weight': 'model.embed_tokens.weight',
  'shared_head.head.weight': 'lm_head.weight',
}


@dataclasses.dataclass(frozen=True)
class Rule:
  """`path` [ours] is stored in the tensor `name` [theirs]; see the module's docstring."""

  path: str
  ours: str
  name: str
  theirs: str
  float32: bool = False  # Kept in float32 whatever the model's dtype is.


_TOP = (
  Rule('embed', 'V D', 'model.embed_tokens.weight', 'V D'),
  Rule('final_norm', 'D', 'model.norm.weight', 'D'),
  Rule('lm_head', 'D V', 'lm_head.weight', 'V D'),
)
_LAYER = (
  Rule('attn_norm', 'D', 'input_layernorm.weight', 'D'),
  Rule('mlp_norm', 'D', 'post_attention_layernorm.weight', 'D'),
  Rule('attn/w_dq', 'D Q', 'self_attn.q_a_proj.weight', 'Q D'),
  Rule('attn/q_norm', 'Q', 'self_attn.q_a_layernorm.weight', 'Q'),
  Rule('attn/w_uq', 'Q N nope+R', 'self_attn.q_b_proj.weight', 'N.nope+R Q'),
  Rule('attn/w_dkv', 'D L+R', 'self_attn.kv_a_proj_with_mqa.weight', 'L+R D'),
  Rule('attn/kv_norm', 'L', 'self_attn.kv_a_layernorm.weight', 'L'),
  Rule('attn/w_uk', 'L N nope', 'self_attn.kv_b_proj.weight', 'N.nope+v L'),
  Rule('attn/w_uv', 'L N v', 'self_attn.kv_b_proj.weight', 'N.nope+v L'),
  Rule('attn/w_o', 'N v D', 'self_attn.o_proj.weight', 'D N.v'),
)
_INDEXER = (
  Rule('attn/indexer/w_q', 'Q I J', 'self_attn.indexer.wq_b.weight', 'I.J Q'),
  Rule('attn/indexer/w_k', 'D J', 'self_attn.indexer.wk.weight', 'J D'),
  Rule('attn/indexer/k_norm_scale', 'J', 'self_attn.indexer.k_norm.weight', 'J'),
  Rule('attn/indexer/k_norm_bias', 'J', 'self_attn.indexer.k_norm.bias', 'J'),
  Rule('attn/indexer/w_w', 'D I', 'self_attn.indexer.weights_proj.weight', 'I D'),
)
_DENSE = (
  Rule('mlp/w_gate', 'D F', 'mlp.gate_proj.weight', 'F D'),
  Rule('mlp/w_up', 'D F', 'mlp.up_proj.weight', 'F D'),
  Rule('mlp/w_down', 'F D', 'mlp.down_proj.weight', 'D F'),
)
_MOE = (
  Rule('moe/router/w', 'D E', 'mlp.gate.weight', 'E D', float32=True),
  Rule('moe/router/bias', 'E', 'mlp.gate.e_score_correction_bias', 'E', float32=True),
  Rule('moe/experts/w_gate', 'D Fe', 'mlp.experts.{E}.gate_proj.weight', 'Fe D'),
  Rule('moe/experts/w_up', 'D Fe', 'mlp.experts.{E}.up_proj.weight', 'Fe D'),
  Rule('moe/experts/w_down', 'Fe D', 'mlp.experts.{E}.down_proj.weight', 'D Fe'),
  Rule('moe/shared/w_gate', 'D Fs', 'mlp.shared_experts.gate_proj.weight', 'Fs D'),
  Rule('moe/shared/w_up', 'D Fs', 'mlp.shared_experts.up_proj.weight', 'Fs D'),
  Rule('moe/shared/w_down', 'Fs D', 'mlp.shared_experts.down_proj.weight', 'D Fs'),
)
_MTP = (
  Rule('embed_norm', 'D', 'enorm.weight', 'D'),
  Rule('hidden_norm', 'D', 'hnorm.weight', 'D'),
  Rule('w_proj', '2D D', 'eh_proj.weight', 'D 2D'),  # The embedding's half comes first.
  Rule('norm', 'D', 'shared_head.norm.weight', 'D'),
)
# The one float32 tensor that stays float32 on disk too (Hugging Face's _keep_in_fp32_modules).
CORRECTION_BIAS = 'moe/router/bias'


@dataclasses.dataclass(frozen=True)
class Layout:
  """How one checkpoint tensor holds one parameter (without our stacking axes).

  Attributes:
    shape: the parameter's shape.
    groups: per axis of the tensor, the sizes that it splits into.
    offset: per axis of `view`, where the parameter begins.
    order: axis i of the parameter is axis order[i] of `view`.
  """

  shape: tuple[int, ...]
  groups: tuple[tuple[int, ...], ...]
  offset: tuple[int, ...]
  order: tuple[int, ...]

  @property
  def hf_shape(self) -> tuple[int, ...]:
    """The tensor's shape."""
    return tuple(math.prod(group) for group in self.groups)

  @property
  def view(self) -> tuple[int, ...]:
    """`hf_shape` with its fused axes split."""
    return tuple(size for group in self.groups for size in group)

  def locate(self, index: tuple[slice, ...]) -> tuple[slice, ...]:
    """The slices of `view` that hold the slices `index` of the parameter, in the view's order."""
    out = [slice(None)] * len(self.view)
    for axis, part, size in zip(self.order, index, self.shape, strict=True):
      start, stop, _ = part.indices(size)
      out[axis] = slice(self.offset[axis] + start, self.offset[axis] + stop)
    return tuple(out)

  @property
  def inverse(self) -> tuple[int, ...]:
    """Axis i of `view` is axis inverse[i] of the parameter."""
    return tuple(int(i) for i in np.argsort(self.order))


@dataclasses.dataclass(frozen=True)
class Leaf:
  """One array of our tree: `stack` leading axes (rows of a stack, experts), then `layout.shape`."""

  path: str
  stack: tuple[int, ...]
  layout: Layout
  template: str  # The tensor's name with {layer} and {E} open.
  first_layer: int
  layer_step: int
  float32: bool

  @property
  def shape(self) -> tuple[int, ...]:
    """The array's shape, stacking axes first."""
    return self.stack + self.layout.shape

  def name(self, lead: tuple[int, ...]) -> str:
    """The checkpoint's name of `array[lead]`, lead = (), (row,) or (row, expert)."""
    row, expert = (*lead, 0, 0)[:2]
    return self.template.format(layer=self.first_layer + row * self.layer_step, E=expert)

  def leads(self):
    """All indices of the stacking axes."""
    return itertools.product(*(range(n) for n in self.stack))


def leaves(config: ModelConfig) -> dict[str, Leaf]:
  """Every array of our tree by its path, e.g. 'moe/block0/attn/w_uk'.

  Raises:
    ValueError: if the config describes a model that has no Hugging Face form (GQA).
  """
  if config.attention != 'mla':
    raise ValueError(
      f'attention={config.attention!r} has no Hugging Face form; only attention="mla" has'
    )
  dims = _dims(config)
  out: dict[str, Leaf] = {}

  def add(rules, path='', prefix='', rows=(), first=0, step=1):
    for rule in rules:
      experts = (config.n_routed_experts,) if '{E}' in rule.name else ()
      out[path + rule.path] = Leaf(
        path + rule.path, rows + experts, _layout(rule, dims), prefix + rule.name, first, step,
        rule.float32,
      )  # fmt: skip

  layer = 'model.layers.{layer}.'
  add(_TOP)
  for stack in config.stacks:
    for j, block in enumerate(stack.blocks):
      rules = _LAYER + (_INDEXER if block.indexer == 'full' else ())
      rules += _DENSE if block.mlp == 'dense' else _MOE
      path = f'{stack.name}/block{j}/'
      add(rules, path, layer, (stack.repeats,), stack.first_layer + j, len(stack.blocks))
  if config.num_nextn_predict_layers:
    rows, first = (config.num_nextn_predict_layers,), config.num_hidden_layers
    add(_MTP, 'mtp/', layer, rows, first)
    add(_LAYER + _INDEXER + _MOE, 'mtp/block/', layer, rows, first)
  return out


def sources(config: ModelConfig) -> dict[str, list[tuple[Leaf, tuple[int, ...]]]]:
  """Every tensor of the checkpoint by name, with the `leaf[lead]` that it holds, in layer order."""
  out: dict[str, list[tuple[Leaf, tuple[int, ...]]]] = {}
  for leaf in leaves(config).values():
    for lead in leaf.leads():
      out.setdefault(leaf.name(lead), []).append((leaf, lead))
  return dict(sorted(out.items(), key=lambda item: _natural(item[0])))


def hf_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
  """Names and shapes of every tensor of the checkpoint, without the copies of `copies`."""
  return {name: held[0][0].layout.hf_shape for name, held in sources(config).items()}


def copies(config: ModelConfig) -> dict[str, str]:
  """Tensors of the MTP layers that repeat another one: name -> name of the original.

  DeepSeek-V3.2 stores the embedding and the output head a second time inside the MTP layer, GLM-5
  does not. Loading accepts them from either; saving writes them for `deepseek_v32`.
  """
  first = config.num_hidden_layers
  return {
    f'model.layers.{layer}.{suffix}': original
    for layer in range(first, first + config.num_nextn_predict_layers)
    for suffix, original in _MTP_COPIES.items()
  }


def param_shapes(config: ModelConfig) -> dict[str, Any]:
  """Our parameter tree as a nested dict of `jax.ShapeDtypeStruct`."""
  return unflatten(
    {
      path: jax.ShapeDtypeStruct(leaf.shape, jnp.float32 if leaf.float32 else config.param_dtype)
      for path, leaf in leaves(config).items()
    }
  )


def flatten(tree: dict[str, Any], prefix: str = '') -> dict[str, Any]:
  """A nested dict as {'a/b/c': leaf}."""
  out: dict[str, Any] = {}
  for key, value in tree.items():
    if isinstance(value, dict):
      out |= flatten(value, f'{prefix}{key}{SEPARATOR}')
    else:
      out[prefix + key] = value
  return out


def unflatten(flat: dict[str, Any]) -> dict[str, Any]:
  """The inverse of `flatten`."""
  tree: dict[str, Any] = {}
  for path, value in flat.items():
    *parents, last = path.split(SEPARATOR)
    node = tree
    for key in parents:
      node = node.setdefault(key, {})
    node[last] = value
  return tree


def _dims(c: ModelConfig) -> dict[str, int]:
  return {
    'V': c.vocab_size, 'D': c.hidden_size, '2D': 2 * c.hidden_size,
    'Q': c.q_lora_rank, 'L': c.kv_lora_rank, 'R': c.qk_rope_head_dim,
    'N': c.num_attention_heads, 'nope': c.qk_nope_head_dim, 'v': c.v_head_dim,
    'I': c.index_n_heads, 'J': c.index_head_dim, 'E': c.n_routed_experts,
    'F': c.intermediate_size, 'Fe': c.moe_intermediate_size,
    'Fs': c.moe_intermediate_size * c.n_shared_experts,
  }  # fmt: skip


def _layout(rule: Rule, dims: dict[str, int]) -> Layout:
  def size(factor: str) -> int:
    return sum(dims[part] for part in factor.split('+'))

  ours = rule.ours.split()
  factors = [axis.split('.') for axis in rule.theirs.split()]
  offset, order = [], {}
  for position, factor in enumerate(f for axis in factors for f in axis):
    start = 0
    if factor in ours:
      kept = factor
    else:  # The parameter is one part of a concatenation.
      parts = factor.split('+')
      kept = next(part for part in parts if part in ours)
      start = sum(dims[part] for part in parts[: parts.index(kept)])
    offset.append(start)
    order[kept] = position
  return Layout(
    shape=tuple(map(size, ours)),
    groups=tuple(tuple(map(size, axis)) for axis in factors),
    offset=tuple(offset),
    order=tuple(order[o] for o in ours),
  )


def _natural(name: str) -> list[tuple[int, str]]:
  return [(int(p), '') if p.isdigit() else (-1, p) for p in name.split('.')]
