"""Model configuration: one frozen, hashable dataclass, and the named sizes.

Field names are those of the released `config.json` (model types `glm_moe_dsa` and `deepseek_v32`),
so a reader of the Hugging Face file already knows them. Fields that the file lacks are listed last,
each with its reason. Table 10 of the paper (arXiv 2602.15763) gives the sizes of GLM-5.
"""

import dataclasses
import difflib
import json
import math
import os
from typing import Any, Literal


@dataclasses.dataclass(frozen=True)
class Yarn:
  """YaRN rope scaling (arXiv 2309.00071), used by DeepSeek-V3.2; GLM-5 uses none."""

  factor: float = 40.0
  beta_fast: float = 32.0
  beta_slow: float = 1.0
  mscale: float = 1.0
  mscale_all_dim: float = 1.0
  original_max_position_embeddings: int = 4096


@dataclasses.dataclass(frozen=True)
class BlockSpec:
  """What one decoder layer contains: its feed-forward kind and where its selection comes from."""

  mlp: Literal['dense', 'moe']
  indexer: Literal['full', 'shared', 'none']


@dataclasses.dataclass(frozen=True)
class Stack:
  """`repeats` copies of a short sequence of blocks, scanned over; parameters are stacked on axis 0.

  Layer `first_layer + r * len(blocks) + j` of the checkpoint is row `r` of `params[name]['block{j}']`.
  """

  name: str
  blocks: tuple[BlockSpec, ...]
  repeats: int
  first_layer: int


@dataclasses.dataclass(frozen=True)
class ModelConfig:
  """Everything that determines the model's mathematics, and a few execution choices.

  Hashable, hence a static argument of `jax.jit`. Change one with `config.replace(field=value)`.
  The defaults are GLM-5's.
  """

  model_type: str = 'glm_moe_dsa'
  vocab_size: int = 154880
  hidden_size: int = 6144
  num_hidden_layers: int = 78
  first_k_dense_replace: int = 3
  intermediate_size: int = 12288
  # Mixture of experts (section 2.1; router as in DeepSeek-V3).
  moe_intermediate_size: int = 2048
  n_routed_experts: int = 256
  n_shared_experts: int = 1
  num_experts_per_tok: int = 8
  n_group: int = 1
  topk_group: int = 1
  scoring_func: Literal['sigmoid', 'softmax'] = 'sigmoid'
  norm_topk_prob: bool = True
  routed_scaling_factor: float = 2.5
  # Multi-head latent attention (MLA-256: 64 heads of 192 + 64).
  attention: Literal['mla', 'gqa'] = 'mla'
  num_attention_heads: int = 64
  num_key_value_heads: int = 64  # Only read by attention='gqa'.
  q_lora_rank: int = 2048
  kv_lora_rank: int = 512
  qk_nope_head_dim: int = 192
  qk_rope_head_dim: int = 64
  v_head_dim: int = 256
  rope_theta: float = 1e6
  rope_scaling: Yarn | None = None
  max_position_embeddings: int = 202752
  # DeepSeek sparse attention (section 2.1.1).
  index_n_heads: int = 32
  index_head_dim: int = 128
  index_topk: int = 2048
  indexer_types: tuple[str, ...] | None = None  # One of full | shared per layer; None is all full.
  indexer_rope: Literal['interleaved', 'half'] = 'interleaved'  # 'half' is DeepSeek-V3.2's layout.
  # Multi-token prediction (section 2.1).
  num_nextn_predict_layers: int = 1
  index_share_for_mtp_iteration: bool = False
  # Norms and initialisation.
  rms_norm_eps: float = 1e-5
  initializer_range: float = 0.02
  eos_token_id: tuple[int, ...] = (154820, 154827, 154829)
  pad_token_id: int | None = 154820

  # --- Not in config.json ---
  # q_a/kv_a norm epsilon. Hugging Face uses 1e-6, vLLM and Megatron rms_norm_eps; the paper is
  # silent. 1e-6 reproduces the reference implementation.
  latent_norm_eps: float = 1e-6
  index_norm_eps: float = 1e-6
  # False attends to every visible key (before DSA conversion, and its warm-up stage).
  sparse_attention: bool = True
  dtype: Literal['float32', 'bfloat16'] = (
    'float32'  # Of activations; softmax and norms are float32.
  )
  param_dtype: Literal['float32', 'bfloat16'] = 'float32'
  # What the backward pass computes again of a layer: nothing, all of it, or all but attention's output.
  # Which keys the kernels have selected is kept in any case.
  remat: Literal['none', 'block', 'block_but_attention'] = 'none'
  # With `remat`: the inputs of the layers, which it keeps, wait in the host's memory.
  offload_inputs: bool = False
  scan_unroll: int = 1  # Layers per iteration of the scan over a stack.
  # How experts multiply, see ops/dispatch.py. 'ragged_dot' is for TPUs: elsewhere it computes all.
  # 'rounds' has no gradient; the engine takes it instead of 'blocks'.
  expert_matmul: Literal['blocks', 'ragged_dot', 'rounds'] = 'blocks'
  # Experts on several devices (ops/expert_parallel.py): rows that one can receive, as a multiple of an
  # even load; 0 has room for every possible load. What does not fit makes the step invalid and ends the
  # run ('error') or is left out of the sum over experts, and counted ('drop').
  expert_capacity: float = 0.0
  expert_overflow: Literal['error', 'drop'] = 'error'
  # Attention works on query chunks so that no score tensor exceeds this many elements.
  attention_chunk_elements: int = 1 << 26

  def __post_init__(self):
    if self.indexer_types is not None:
      object.__setattr__(self, 'indexer_types', tuple(self.indexer_types))
    object.__setattr__(self, 'eos_token_id', _as_tuple(self.eos_token_id))
    _validate(self)

  def replace(self, **changes: Any) -> 'ModelConfig':
    unknown = set(changes) - {f.name for f in dataclasses.fields(self)}
    if unknown:
      raise ValueError(_unknown_key_message(sorted(unknown)[0]))
    return dataclasses.replace(self, **changes)

  @property
  def qk_head_dim(self) -> int:
    return self.qk_nope_head_dim + self.qk_rope_head_dim

  @property
  def attention_scale(self) -> float:
    """Softmax scale: qk_head_dim ** -0.5, times YaRN's mscale squared where YaRN is used."""
    scale = self.qk_head_dim**-0.5
    yarn = self.rope_scaling
    if yarn and yarn.mscale_all_dim and yarn.factor > 1:
      scale *= (0.1 * yarn.mscale_all_dim * math.log(yarn.factor) + 1.0) ** 2
    return scale

  @property
  def blocks(self) -> tuple[BlockSpec, ...]:
    """The decoder layers in order, without MTP layers."""
    indexers: tuple[Any, ...] = self.indexer_types or ('full',) * self.num_hidden_layers
    if self.attention == 'gqa':
      indexers = ('none',) * self.num_hidden_layers
    return tuple(
      BlockSpec('dense' if i < self.first_k_dense_replace else 'moe', indexers[i])
      for i in range(self.num_hidden_layers)
    )

  @property
  def mtp_block(self) -> BlockSpec:
    """The MTP layer is a sparse-MoE layer with an indexer of its own, also in GLM-5.2."""
    return BlockSpec('moe', 'none' if self.attention == 'gqa' else 'full')

  @property
  def stacks(self) -> tuple[Stack, ...]:
    """Groups the layers into scannable stacks: `dense`, `moe`, with a suffix where one kind needs two.

    A unit is an indexer layer with the shared layers that follow it (GLM-5.2's IndexShare); equal
    neighbouring units become one stack. GLM-5: dense x 3, moe x 75. GLM-5.2: dense x 3,
    moe (3 shared) x 3, moe1 (1 full + 3 shared) x 18.
    """
    units: list[tuple[BlockSpec, ...]] = []
    for block in self.blocks:
      follows = (
        block.indexer == 'shared' and units and units[-1][0].indexer == 'full'
        and units[-1][0].mlp == block.mlp
      )  # fmt: skip
      if follows:
        units[-1] += (block,)
      else:
        units.append((block,))
    stacks: list[Stack] = []
    layer = 0
    for unit in units:
      if stacks and stacks[-1].blocks == unit:
        stacks[-1] = dataclasses.replace(stacks[-1], repeats=stacks[-1].repeats + 1)
      else:
        same_kind = sum(s.name.startswith(unit[0].mlp) for s in stacks)
        stacks.append(Stack(f'{unit[0].mlp}{same_kind or ""}', unit, 1, layer))
      layer += len(unit)
    return tuple(stacks)

  @property
  def shares_selection(self) -> bool:
    return any(b.indexer == 'shared' for b in self.blocks)

  @classmethod
  def from_hf(cls, source: str | os.PathLike | dict[str, Any]) -> 'ModelConfig':
    """Reads a Hugging Face config.json (a path, its directory, or the parsed dict).

    Raises:
      ValueError: for another model_type or a feature this implementation does not have.
    """
    if not isinstance(source, dict):
      path = os.fspath(source)
      if os.path.isdir(path):
        path = os.path.join(path, 'config.json')
      try:
        with open(path, encoding='utf-8') as f:
          source = json.load(f)
      except OSError as e:
        raise ValueError(f'cannot read the model config {path}: {e.strerror}') from e
      except json.JSONDecodeError as e:
        raise ValueError(f'{path} is not valid JSON: {e}') from e
      if not isinstance(source, dict):
        raise ValueError(f'{path} must hold a JSON object, found {type(source).__name__}')
    return _from_hf(cls, source)

  def to_hf(self) -> dict[str, Any]:
    """The config.json that transformers reads. See `from_hf` for the inverse."""
    return _to_hf(self)


_HF_MODEL_TYPES = {'glm_moe_dsa': 'GlmMoeDsaForCausalLM', 'deepseek_v32': 'DeepseekV32ForCausalLM'}
# Fields that config.json stores under the same name.
_HF_FIELDS = (
  'model_type', 'vocab_size', 'hidden_size', 'num_hidden_layers', 'first_k_dense_replace',
  'intermediate_size', 'moe_intermediate_size', 'n_routed_experts', 'n_shared_experts',
  'num_experts_per_tok', 'n_group', 'topk_group', 'scoring_func', 'norm_topk_prob',
  'routed_scaling_factor', 'num_attention_heads', 'num_key_value_heads', 'q_lora_rank',
  'kv_lora_rank', 'qk_nope_head_dim', 'qk_rope_head_dim', 'v_head_dim', 'max_position_embeddings',
  'index_n_heads', 'index_head_dim', 'index_topk', 'num_nextn_predict_layers',
  'index_share_for_mtp_iteration', 'rms_norm_eps', 'initializer_range', 'pad_token_id',
)  # fmt: skip
_HF_REQUIRED = (
  'vocab_size', 'hidden_size', 'num_hidden_layers', 'intermediate_size', 'moe_intermediate_size',
  'n_routed_experts', 'num_experts_per_tok', 'num_attention_heads', 'q_lora_rank', 'kv_lora_rank',
  'qk_nope_head_dim', 'qk_rope_head_dim', 'v_head_dim',
)  # fmt: skip


def _from_hf(cls, raw: dict[str, Any]) -> ModelConfig:
  model_type = raw.get('model_type')
  if model_type not in _HF_MODEL_TYPES:
    raise ValueError(
      f'config.json has model_type {model_type!r}; supported are {sorted(_HF_MODEL_TYPES)}'
    )
  missing = [k for k in _HF_REQUIRED if k not in raw]
  if missing:
    raise ValueError(f'config.json lacks {missing}')
  unsupported = {'tie_word_embeddings': True, 'attention_bias': True, 'mlp_bias': True}
  for key, value in unsupported.items():
    if raw.get(key) == value:
      raise ValueError(f'config.json has {key}={value}, which this implementation does not support')
  if raw.get('hidden_act', 'silu') != 'silu':
    raise ValueError(f'config.json has hidden_act {raw["hidden_act"]!r}; expected "silu"')
  if raw.get('rope_interleave', True) is not True:
    raise ValueError('config.json has rope_interleave false; MLA rope is interleaved here')

  fields = {k: raw[k] for k in _HF_FIELDS if raw.get(k) is not None}
  rope = raw.get('rope_parameters') or raw.get('rope_scaling') or {}
  theta = rope.get('rope_theta', raw.get('rope_theta'))
  if theta is None:
    raise ValueError('config.json names no rope_theta (neither rope_parameters nor rope_theta)')
  fields['rope_theta'] = float(theta)
  kind = rope.get('rope_type', rope.get('type', 'default'))
  if kind == 'yarn':
    _check_yarn(rope)
    names = {f.name for f in dataclasses.fields(Yarn)}
    fields['rope_scaling'] = Yarn(**{k: v for k, v in rope.items() if k in names})
  elif kind != 'default':
    raise ValueError(f'config.json has rope_type {kind!r}; supported are "default" and "yarn"')
  fields['indexer_types'] = _indexer_types(raw)
  interleaved = raw.get('indexer_rope_interleave', model_type == 'glm_moe_dsa')
  fields['indexer_rope'] = 'interleaved' if interleaved else 'half'
  fields.setdefault('num_nextn_predict_layers', 0)
  fields['eos_token_id'] = _as_tuple(raw.get('eos_token_id'))
  fields.setdefault('pad_token_id', None)
  mlp_types = raw.get('mlp_layer_types')
  if mlp_types is not None:
    dense = fields['first_k_dense_replace'] = mlp_types.count('dense')
    if mlp_types != ['dense'] * dense + ['sparse'] * (len(mlp_types) - dense):
      raise ValueError('config.json: mlp_layer_types must be dense layers first, then sparse ones')
  return cls(**fields)


def _check_yarn(rope: dict[str, Any]) -> None:
  """Refuses the options of YaRN that would scale cos and sin or shape the ramp otherwise."""
  mscale, all_dim = rope.get('mscale'), rope.get('mscale_all_dim')
  if not mscale or mscale != all_dim:
    raise ValueError(
      f'config.json has YaRN with mscale {mscale} and mscale_all_dim {all_dim}; supported are equal'
      ' ones, as DeepSeek-V3.2 has, for which cos and sin are not scaled'
    )
  for key, value in (('attention_factor', 1.0), ('truncate', True)):
    if rope.get(key, value) not in (value, None):
      raise ValueError(f'config.json has YaRN with {key} {rope[key]}; supported is {value}')


def _indexer_types(raw: dict[str, Any]) -> tuple[str, ...] | None:
  """Explicit indexer_types, or the pattern full iff max(l - offset + 1, 0) % freq == 0."""
  if raw.get('indexer_types'):
    types = tuple(raw['indexer_types'])
  else:
    freq = raw.get('index_topk_freq') or 1
    offset = raw.get('index_skip_topk_offset', 2)
    types = index_share_pattern(raw['num_hidden_layers'], freq, offset)
  return None if set(types) == {'full'} else types


def index_share_pattern(num_layers: int, freq: int, offset: int) -> tuple[str, ...]:
  """IndexShare (GLM-5.2): layer l has its own indexer iff max(l - offset + 1, 0) % freq == 0."""
  return tuple(
    'full' if max(i - offset + 1, 0) % freq == 0 else 'shared' for i in range(num_layers)
  )


def _to_hf(config: ModelConfig) -> dict[str, Any]:
  if config.attention != 'mla':
    raise ValueError('only attention="mla" models have a Hugging Face form; this one is GQA')
  if config.model_type not in _HF_MODEL_TYPES:
    raise ValueError(f'model_type {config.model_type!r} has no Hugging Face form')
  out: dict[str, Any] = {'architectures': [_HF_MODEL_TYPES[config.model_type]]}
  out |= {k: getattr(config, k) for k in _HF_FIELDS}
  rope: dict[str, Any] = {'rope_theta': config.rope_theta, 'rope_type': 'default'}
  if config.rope_scaling:
    rope |= {'rope_type': 'yarn'} | dataclasses.asdict(config.rope_scaling)
  n = config.num_hidden_layers
  dense = config.first_k_dense_replace
  out |= {
    'rope_parameters': rope,
    'rope_interleave': True,
    'indexer_rope_interleave': config.indexer_rope == 'interleaved',
    'indexer_types': list(config.indexer_types or ('full',) * n),
    'mlp_layer_types': ['dense'] * dense + ['sparse'] * (n - dense),
    'layer_types': ['indexed_attention'] * n,
    'qk_head_dim': config.qk_head_dim,
    'head_dim': config.qk_rope_head_dim,  # Legacy readers take the rope dimension from here.
    'hidden_act': 'silu',
    'attention_bias': False,
    'attention_dropout': 0.0,
    'mlp_bias': False,
    'topk_method': 'noaux_tc',
    'moe_layer_freq': 1,
    'tie_word_embeddings': False,
    'use_cache': True,
    'eos_token_id': list(config.eos_token_id) or None,
    'dtype': config.param_dtype,
  }
  return out


def _as_tuple(ids) -> tuple[int, ...]:
  if ids is None:
    return ()
  return (ids,) if isinstance(ids, int) else tuple(ids)


def _unknown_key_message(key: str) -> str:
  names = [f.name for f in dataclasses.fields(ModelConfig)]
  near = difflib.get_close_matches(key, names, n=1, cutoff=0.4)
  hint = f'; did you mean {near[0]!r}?' if near else ''
  return f'ModelConfig has no field {key!r}{hint}'


def _validate(c: ModelConfig) -> None:
  def check(ok: bool, message: str):
    if not ok:
      raise ValueError(f'ModelConfig: {message}')

  for f in dataclasses.fields(c):
    choices = getattr(f.type, '__args__', ()) if 'Literal' in str(f.type) else ()
    if choices:
      value = getattr(c, f.name)
      check(value in choices, f'{f.name} must be one of {list(choices)}, found {value!r}')
  check(
    0 <= c.first_k_dense_replace <= c.num_hidden_layers,
    f'first_k_dense_replace={c.first_k_dense_replace} is not within'
    f' 0..num_hidden_layers={c.num_hidden_layers}',
  )
  check(c.qk_rope_head_dim % 2 == 0, f'qk_rope_head_dim={c.qk_rope_head_dim} must be even')
  check(
    c.qk_rope_head_dim <= c.index_head_dim,
    f'index_head_dim={c.index_head_dim} must hold the {c.qk_rope_head_dim} rope dimensions',
  )
  check(
    1 <= c.num_experts_per_tok <= c.n_routed_experts,
    f'num_experts_per_tok={c.num_experts_per_tok} exceeds n_routed_experts={c.n_routed_experts}',
  )
  check(
    c.n_routed_experts % c.n_group == 0 and c.topk_group <= c.n_group,
    f'n_group={c.n_group} must divide n_routed_experts={c.n_routed_experts}'
    f' and be at least topk_group={c.topk_group}',
  )
  group = c.n_routed_experts // c.n_group
  check(
    c.n_group == 1 or (group >= 2 and c.topk_group * group >= c.num_experts_per_tok),
    f'topk_group={c.topk_group} groups of {group} experts cannot provide'
    f' num_experts_per_tok={c.num_experts_per_tok}; a group needs at least 2',
  )
  check(
    c.expert_capacity == 0 or c.expert_capacity >= 1,
    f'expert_capacity={c.expert_capacity} must be 0 (every possible load) or at least 1 (an even one)',
  )
  check(
    c.remat != 'none' or not c.offload_inputs,
    "offload_inputs is of what remat keeps: it needs remat='block' or 'block_but_attention'",
  )
  check(c.index_topk >= 1, f'index_topk={c.index_topk} must be at least 1')
  check(
    c.attention != 'gqa' or c.num_attention_heads % c.num_key_value_heads == 0,
    f'num_key_value_heads={c.num_key_value_heads} must divide'
    f' num_attention_heads={c.num_attention_heads}',
  )
  if c.indexer_types is not None:
    check(
      len(c.indexer_types) == c.num_hidden_layers,
      f'indexer_types has {len(c.indexer_types)} entries for {c.num_hidden_layers} layers',
    )
    check(
      set(c.indexer_types) <= {'full', 'shared'} and c.indexer_types[0] == 'full',
      'indexer_types must be "full" or "shared", the first one "full"',
    )


# --- Named sizes ---


def glm5(**changes) -> ModelConfig:
  """GLM-5, 744B-A40B (Table 10)."""
  return ModelConfig().replace(**changes)


def glm5_1(**changes) -> ModelConfig:
  """GLM-5.1: the architecture of GLM-5, other weights."""
  return glm5(**changes)


def glm5_2(**changes) -> ModelConfig:
  """GLM-5.2: indexers on 21 of 78 layers (IndexShare), 1M context."""
  config = ModelConfig(
    rope_theta=8e6,
    max_position_embeddings=1048576,
    indexer_types=index_share_pattern(78, freq=4, offset=3),
    index_share_for_mtp_iteration=True,
  )
  return config.replace(**changes)


def deepseek_v32(**changes) -> ModelConfig:
  """DeepSeek-V3.2 (arXiv 2512.02556), whose sparse attention GLM-5 adopts."""
  config = ModelConfig(
    model_type='deepseek_v32', vocab_size=129280, hidden_size=7168, num_hidden_layers=61,
    intermediate_size=18432, num_attention_heads=128, num_key_value_heads=128, q_lora_rank=1536,
    qk_nope_head_dim=128, v_head_dim=128, n_group=8, topk_group=4, index_n_heads=64,
    indexer_rope='half', rope_theta=1e4, rope_scaling=Yarn(), max_position_embeddings=163840,
    rms_norm_eps=1e-6, eos_token_id=(1,), pad_token_id=None,
  )  # fmt: skip
  return config.replace(**changes)


def nano(**changes) -> ModelConfig:
  """About 4M parameters: every mechanism of GLM-5, minutes on two CPU cores."""
  config = ModelConfig(
    vocab_size=4096, hidden_size=128, num_hidden_layers=3, first_k_dense_replace=1,
    intermediate_size=384, moe_intermediate_size=128, n_routed_experts=16, num_experts_per_tok=2,
    num_attention_heads=2, num_key_value_heads=2, q_lora_rank=96, kv_lora_rank=64,
    qk_nope_head_dim=48, qk_rope_head_dim=16, v_head_dim=64, index_n_heads=2, index_head_dim=32,
    index_topk=64, rope_theta=1e4, max_position_embeddings=4096, eos_token_id=(), pad_token_id=None,
  )  # fmt: skip
  return config.replace(**changes)


def small(**changes) -> ModelConfig:
  """About 30M parameters."""
  return nano(
    vocab_size=8192, hidden_size=384, num_hidden_layers=6, intermediate_size=1024,
    moe_intermediate_size=192, n_routed_experts=16, index_n_heads=4, num_attention_heads=6, num_key_value_heads=6,
    q_lora_rank=192, kv_lora_rank=128, qk_nope_head_dim=48, v_head_dim=64, index_topk=128,
  ).replace(**changes)  # fmt: skip


def medium(**changes) -> ModelConfig:
  """About 120M parameters."""
  return nano(
    vocab_size=16384, hidden_size=640, num_hidden_layers=8, intermediate_size=1792,
    moe_intermediate_size=352, n_routed_experts=16, num_experts_per_tok=4, num_attention_heads=10,
    num_key_value_heads=10, q_lora_rank=320, kv_lora_rank=192, qk_nope_head_dim=48,
    qk_rope_head_dim=32, v_head_dim=80, index_n_heads=8, index_head_dim=64, index_topk=256,
  ).replace(**changes)  # fmt: skip


SIZES = {f.__name__: f for f in (glm5, glm5_1, glm5_2, deepseek_v32, nano, small, medium)}


def from_size(size: str, **changes) -> ModelConfig:
  """A named size with changes, as the configs in configs/ write it."""
  if size not in SIZES:
    near = difflib.get_close_matches(size, SIZES, n=1, cutoff=0.3)
    hint = f'; did you mean {near[0]!r}?' if near else ''
    raise ValueError(f'unknown model size {size!r}, known are {sorted(SIZES)}{hint}')
  return SIZES[size](**changes)
