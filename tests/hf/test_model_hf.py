"""Live against transformers: logits, loss and all gradients of models other than the golden one.

The weights go from transformers' own save_pretrained through load_hf.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from glm5_jax.convert import load_hf
from glm5_jax.modules import model
from tests import tiny

pytestmark = pytest.mark.hf

BATCH, TIME = 3, 37
LEFT_PADDING = (0, 11, 4)
# Many index heads: with few, ReLU leaves whole plateaus of scores at exactly 0, and which of those
# keys torch.topk takes is not defined.
COMMON = {
  'vocab_size': 90, 'hidden_size': 56, 'intermediate_size': 76, 'moe_intermediate_size': 36,
  'n_routed_experts': 12, 'num_experts_per_tok': 4, 'num_attention_heads': 6,
  'num_key_value_heads': 6, 'q_lora_rank': 34, 'kv_lora_rank': 22, 'qk_nope_head_dim': 14,
  'qk_rope_head_dim': 10, 'v_head_dim': 18, 'index_n_heads': 17, 'index_head_dim': 26,
  'max_position_embeddings': 128, 'pad_token_id': 0, 'eos_token_id': [1, 2],
}  # fmt: skip
YARN = {
  'rope_type': 'yarn', 'rope_theta': 1e4, 'factor': 4.0, 'beta_fast': 4.0, 'beta_slow': 1.0,
  'mscale': 1.0, 'mscale_all_dim': 1.0, 'original_max_position_embeddings': 32,
}  # fmt: skip
DEFAULT_ROPE = {'rope_type': 'default', 'rope_theta': 5e4}


@dataclasses.dataclass(frozen=True)
class Case:
  """A class of transformers, and what its config changes in COMMON."""

  kind: str
  changes: dict


CASES = {
  'glm5, one dense layer': Case(
    'GlmMoeDsa',
    {'num_hidden_layers': 3, 'first_k_dense_replace': 1, 'index_topk': 7,
     'n_shared_experts': 2, 'rope_parameters': DEFAULT_ROPE},
  ),
  'glm5_2, two dense layers': Case(
    'GlmMoeDsa',
    {'num_hidden_layers': 6, 'first_k_dense_replace': 2, 'index_topk': 11,
     'indexer_types': ['full', 'full', 'shared', 'full', 'shared', 'shared'],
     'norm_topk_prob': False, 'routed_scaling_factor': 1.7, 'rope_parameters': DEFAULT_ROPE},
  ),
  'deepseek_v32': Case(
    'DeepseekV32',
    {'num_hidden_layers': 2, 'first_k_dense_replace': 1, 'index_topk': 9, 'n_group': 4,
     'topk_group': 2, 'rms_norm_eps': 1e-6, 'rope_parameters': YARN},
  ),
}  # fmt: skip


def build(case: Case):
  """A transformers model in float32 with random weights, norms and biases, large enough to matter."""
  import torch
  import transformers

  config = getattr(transformers, f'{case.kind}Config')(**COMMON, **case.changes)
  theirs = getattr(transformers, f'{case.kind}ForCausalLM')._from_config(
    config, attn_implementation='eager', experts_implementation='eager', dtype=torch.float32
  )
  generator = torch.Generator().manual_seed(11)
  with torch.no_grad():
    for name, tensor in (*theirs.named_parameters(), *theirs.named_buffers()):
      if 'inv_freq' in name:
        continue
      noise = torch.randn(tensor.shape, generator=generator)
      if 'norm' in name and name.endswith('weight'):
        tensor.copy_(1 + 0.2 * noise)
      elif tensor.ndim == 1:
        tensor.copy_(0.2 * noise)
      else:
        fan_in = tensor.shape[-1]
        tensor.copy_(noise if 'embed' in name else noise * fan_in**-0.5)
  return torch, theirs


def batch():
  """Tokens, attention mask, positions from each row's first token, and what counts in the loss."""
  rng = np.random.default_rng(1)
  ids = rng.integers(3, COMMON['vocab_size'], (BATCH, TIME))
  mask = np.ones((BATCH, TIME), np.int64)
  for row, padding in enumerate(LEFT_PADDING):
    mask[row, :padding] = 0
    ids[row, :padding] = 0
  positions = np.maximum(np.cumsum(mask, 1) - 1, 0)
  # The token after the padding has nothing before it to be predicted from.
  labels = np.where((mask > 0) & (np.roll(mask, 1, 1) > 0), ids, -100)
  labels[:, 0] = -100
  return ids, mask, positions, labels


@tiny.fast_jit(static_argnames='config')
def loss_and_gradients(params, ids, mask, positions, labels, config):
  def loss(params):
    logits = model.forward(params, ids, config=config, segment_ids=mask, positions=positions).logits
    targets, counts = jnp.maximum(labels[:, 1:], 0), labels[:, 1:] >= 0
    log_probs = jax.nn.log_softmax(logits[:, :-1])
    chosen = jnp.take_along_axis(log_probs, targets[..., None], axis=-1)[..., 0]
    return -jnp.sum(chosen * counts) / jnp.sum(counts), logits

  (value, logits), gradients = jax.value_and_grad(loss, has_aux=True)(params)
  return value, logits, gradients


@pytest.mark.parametrize('name', CASES)
def test_logits_loss_and_gradients(name, tmp_path):
  """On left-padded rows longer than index_topk: 1e-5 in the logits, 1e-4 in every gradient."""
  torch, theirs = build(CASES[name])
  theirs.save_pretrained(tmp_path)
  config, params = load_hf(tmp_path, param_dtype='float32')
  ids, mask, positions, labels = batch()
  out = theirs(
    **{
      k: torch.as_tensor(v)
      for k, v in (('input_ids', ids), ('attention_mask', mask), ('position_ids', positions),
                   ('labels', labels))
    }
  )  # fmt: skip
  out.loss.backward()

  integers = (np.asarray(a, np.int32) for a in (ids, mask, positions, labels))
  value, logits, gradients = loss_and_gradients(params, *integers, config)
  want = out.logits.detach().numpy()
  assert want.std() > 0.3
  tiny.close(f'{name}: logits', logits, want, 1e-5, where=(mask > 0)[..., None])
  tiny.close(f'{name}: loss', value, out.loss.item(), 2e-6)

  found = tiny.fused(tiny.checkpoint_names(gradients, config))
  worst, worst_name, compared = 0.0, '', set()
  for parameter, tensor in theirs.named_parameters():
    if tensor.grad is None:  # transformers runs the indexer without gradients.
      assert '.indexer.' in parameter
      assert not found[parameter].any(), parameter
    else:
      reference = tensor.grad.numpy()
      assert reference.any() and np.isfinite(found[parameter]).all(), parameter
      error = float(np.abs(found[parameter] - reference).max() / np.abs(reference).max())
      worst, worst_name = max((worst, worst_name), (error, parameter))
    compared.add(parameter)
  print(f'[max] {name}: gradients, relative, {len(compared)} tensors: {worst:.2e} in {worst_name}')
  assert worst < 1e-4, worst_name
  assert {k for k in found if 'e_score_correction_bias' not in k} == compared


def test_bfloat16_is_as_close_as_theirs(tmp_path):
  """Weights and activations in bfloat16, against float32 logits: our median token is no further off."""
  torch, theirs = build(CASES['glm5, one dense layer'])
  theirs.save_pretrained(tmp_path)
  config, params = load_hf(tmp_path, param_dtype='bfloat16', dtype='bfloat16')
  rounded = type(theirs).from_pretrained(
    tmp_path, dtype=torch.bfloat16, attn_implementation='eager', experts_implementation='eager'
  )
  ids = batch()[0][:1]  # The row without padding.
  with torch.no_grad():
    exact = theirs(torch.as_tensor(ids)).logits.numpy()
    half = rounded(torch.as_tensor(ids)).logits.float().numpy()
  ours = tiny.forward(params, ids, config).logits
  error = [float(np.median(np.sqrt(np.mean((a - exact) ** 2, -1)))) for a in (ours, half)]
  print(f'[max] bf16 median RMS error: ours {error[0]:.4f}, transformers {error[1]:.4f}')
  assert error[0] < 1.3 * error[1]
