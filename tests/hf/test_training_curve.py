"""Fifty training steps here and in torch, from the same weights: the loss curves agree at every step.

The real step (`make_train_step` with `optim.build`) without the terms that transformers has not: MTP,
the losses of indexer and balance, and the moving router bias.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from glm5_jax.config import ModelConfig
from glm5_jax.convert import save_hf
from glm5_jax.modules.model import init_params, param_count
from glm5_jax.optim.build import build
from glm5_jax.train.state import TrainState
from glm5_jax.train.step import Objective, make_train_step
from tests import tiny

pytestmark = [pytest.mark.hf, pytest.mark.slow]

STEPS, BATCH, TIME = 50, 4, 32
# 0.9M parameters. Enough index heads that ReLU leaves no plateau of scores at exactly 0.
CONFIG = ModelConfig(
  vocab_size=512, hidden_size=128, num_hidden_layers=3, first_k_dense_replace=1,
  intermediate_size=256, moe_intermediate_size=64, n_routed_experts=8, num_experts_per_tok=2,
  num_attention_heads=4, num_key_value_heads=4, q_lora_rank=64, kv_lora_rank=32,
  qk_nope_head_dim=24, qk_rope_head_dim=8, v_head_dim=32, index_n_heads=16, index_head_dim=32,
  index_topk=16, num_nextn_predict_layers=0, rope_theta=1e4, max_position_embeddings=128,
  eos_token_id=(), pad_token_id=None, initializer_range=0.05,
)  # fmt: skip
OPTIM = {
  'name': 'adamw', 'schedule': 'cosine', 'peak_lr': 2e-3, 'end_lr': 0.0, 'warmup_steps': 5,
  'b1': 0.9, 'b2': 0.95, 'eps': 1e-8, 'weight_decay': 0.1, 'clip_norm': 1.0,
}  # fmt: skip


def batches(seed: int = 2) -> list[np.ndarray]:
  """Token rows that are mostly predictable from the token before, so that there is much to learn."""
  rng = np.random.default_rng(seed)
  successor = rng.permutation(CONFIG.vocab_size)
  out = []
  for _ in range(STEPS):
    rows = rng.integers(0, CONFIG.vocab_size, (BATCH, TIME))
    follows = rng.random((BATCH, TIME)) < 0.9
    for t in range(1, TIME):
      rows[:, t] = np.where(follows[:, t], successor[rows[:, t - 1]], rows[:, t])
    out.append(rows)
  return out


def our_curve(params, rows: list[np.ndarray]):
  """(loss, gradient norm, learning rate) of every step."""
  objective = Objective(
    mtp_steps=0, balance_loss_weight=0.0, indexer_loss_weight=0.0, router_bias_rate=0.0
  )
  tx, schedule = build(OPTIM, STEPS)
  step = make_train_step(CONFIG, objective, tx, schedule)
  state = TrainState.create(params, tx, seed=0)
  curve = []
  for tokens in rows:
    weights = np.ones(tokens.shape, np.float32)
    weights[:, -1] = 0
    ones = np.ones(tokens.shape, np.int32)
    batch = {
      'tokens': tokens.astype(np.int32), 'targets': np.roll(tokens, -1, 1).astype(np.int32),
      'weights': weights, 'segment_ids': ones, 'positions': np.cumsum(ones, 1, np.int32) - 1,
    }  # fmt: skip
    state, metrics = step(state, batch)
    assert not metrics['skipped']
    curve.append([float(metrics[k]) for k in ('loss', 'grad_norm', 'lr')])
  return np.array(curve), state.params


def their_curve(directory, rows: list[np.ndarray]):
  """The same in torch, with torch's AdamW and clipping and the schedule of transformers."""
  torch = pytest.importorskip('torch', reason='needs torch (make test-slow)')
  transformers = pytest.importorskip('transformers', reason='needs transformers (make test-slow)')
  model = transformers.GlmMoeDsaForCausalLM.from_pretrained(
    directory, dtype=torch.float32, attn_implementation='eager', experts_implementation='eager'
  )
  no_decay = [p for name, p in model.named_parameters() if 'norm' in name]
  decay = [p for name, p in model.named_parameters() if 'norm' not in name]
  assert all(p.ndim > 1 for p in decay) and all(p.ndim == 1 for p in no_decay)
  optimizer = torch.optim.AdamW(
    [{'params': decay, 'weight_decay': OPTIM['weight_decay']}, {'params': no_decay, 'weight_decay': 0.0}],
    lr=OPTIM['peak_lr'], betas=(OPTIM['b1'], OPTIM['b2']), eps=OPTIM['eps'],
  )  # fmt: skip
  schedule = transformers.get_cosine_schedule_with_warmup(optimizer, OPTIM['warmup_steps'], STEPS)
  curve = []
  for tokens in rows:
    ids = torch.as_tensor(tokens)
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    optimizer.zero_grad()
    loss.backward()
    for name, p in model.named_parameters():
      # transformers runs the indexer without gradients. A gradient of zero, which we have, still
      # decays the weights; torch would leave parameters without any as they are.
      if p.grad is None:
        assert '.indexer.' in name
        p.grad = torch.zeros_like(p)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIM['clip_norm'])
    curve.append([loss.item(), norm.item(), schedule.get_last_lr()[0]])
    optimizer.step()
    schedule.step()
  return np.array(curve), {k: v.detach().numpy() for k, v in model.named_parameters()}


def test_fifty_steps_agree_with_torch(tmp_path):
  """Loss to 1e-4 relative at every step, and the trained weights besides."""
  assert 0.8e6 < param_count(CONFIG) < 1.2e6 and CONFIG.index_topk < TIME
  params = init_params(CONFIG, jax.random.key(2))
  save_hf(tmp_path / 'start', CONFIG, params)
  start = tiny.fused(tiny.checkpoint_names(params, CONFIG))
  rows = batches()
  theirs, their_weights = their_curve(tmp_path / 'start', rows)
  ours, our_params = our_curve(jax.tree.map(jnp.asarray, params), rows)
  error = np.abs(ours / np.where(theirs == 0, 1, theirs) - (theirs != 0))
  for name, column in zip(('loss', 'gradient norm', 'learning rate'), error.T, strict=True):
    print(f'[max] {name}: {column.max():.2e} relative, at step {column.argmax()}')
  print(f'loss {theirs[0, 0]:.4f} -> {theirs[-1, 0]:.4f}, clipped {(theirs[:, 1] > 1).sum()} times')
  print('loss error by step', ' '.join(f'{e:.0e}' for e in error[:, 0]))
  assert theirs[-1, 0] < 0.8 * theirs[0, 0], 'nothing was learned, so nothing was compared'
  assert error[:, 0].max() < 1e-4
  np.testing.assert_allclose(ours[:, 2], theirs[:, 2], rtol=0, atol=1e-6 * OPTIM['peak_lr'])

  found = tiny.fused(tiny.checkpoint_names(our_params, CONFIG))
  off = {}
  for name, weights in their_weights.items():
    moved = np.abs(weights - start[name]).max()
    # The norm in the indexer gets neither gradient nor decay; its matrices only decay.
    assert (moved == 0) == ('.indexer.k_norm.' in name), name
    off[name] = float(np.abs(found[name] - weights).max() / (moved or 1.0))
  worst = max(off, key=off.__getitem__)
  print(f'[max] weights, relative to how far they moved: {off[worst]:.2e} in {worst}')
  # Adam turns rounding into whole steps where a gradient is nearly zero, hence no less.
  assert off[worst] < 1e-2
