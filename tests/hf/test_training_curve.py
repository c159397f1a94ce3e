"""Fifty training steps here and in torch, from the same weights: the loss curves agree at every step.

The real step (`make_train_step` with `optim.build`) without the terms that transformers has not: MTP,
the losses of indexer and balance, and the moving router bias.

Selecting keys and experts is discontinuous: sooner or later a score lies so close to the last one
chosen that rounding decides, and from then on two equally right runs differ by 1e-3. So torch takes
the choices that our step made, and the test checks that these were torch's own but for such ties.
"""

from collections import deque

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from glm5_jax.config import ModelConfig
from glm5_jax.convert import save_hf
from glm5_jax.modules.block import Options
from glm5_jax.modules.model import init_params, param_count
from glm5_jax.optim.build import build
from glm5_jax.train import step as train_step
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


def record_choices(monkeypatch) -> None:
  """Makes the training step return, as metrics, which keys and experts it chose."""
  loss_and_metrics, forward = train_step.loss_and_metrics, train_step.forward

  def recording(params, batch, totals, config, objective):
    seen = []

    def capturing(*args, options, **kwargs):
      out = forward(*args, options=Options(capture=True), **kwargs)
      seen.append(out._replace(aux={k: a for k, a in out.aux.items() if k != 'embedded'}))
      return seen[-1]

    monkeypatch.setattr(train_step, 'forward', capturing)
    loss, (metrics, loads) = loss_and_metrics(params, batch, totals, config, objective)
    layers = [stack['block0'] for stack in seen[-1].aux.values()]
    metrics['selected'] = jnp.concatenate([layer['selected'] for layer in layers])
    metrics['experts'] = jnp.concatenate(
      [layer['router_experts'] for layer in layers if 'router_experts' in layer]
    )
    return loss, (metrics, loads)

  monkeypatch.setattr(train_step, 'loss_and_metrics', recording)


def our_curve(params, rows: list[np.ndarray]):
  """(loss, gradient norm, learning rate) of every step, the trained weights, and all choices."""
  objective = Objective(
    mtp_steps=0, balance_loss_weight=0.0, indexer_loss_weight=0.0, router_bias_rate=0.0
  )
  tx, schedule = build(OPTIM, STEPS)
  step = make_train_step(CONFIG, objective, tx, schedule)
  state = TrainState.create(params, tx, seed=0)
  curve, choices = [], []
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
    choices.append((np.array(metrics['selected']), np.array(metrics['experts'])))
  return np.array(curve), state.params, choices


class Replay:
  """Stands in for the top-k of transformers: returns our choices, and notes where its own differ."""

  def __init__(self, torch):
    self.torch, self.topk, self.tensor_topk = torch, torch.topk, torch.Tensor.topk
    self.selected: deque = deque()
    self.experts: deque = deque()
    self.rows = 0
    self.gaps: list[
      float
    ] = []  # Of every other choice: how much lower the scores are that we took.

  def queue(self, selected, experts) -> None:
    """The choices of one step, layer by layer."""
    assert not self.selected and not self.experts, 'transformers chose less often than we did'
    self.selected.extend(self.torch.as_tensor(layer) for layer in selected)
    self.experts.extend(self.torch.as_tensor(layer, dtype=self.torch.long) for layer in experts)

  def keys(self, scores, k, dim=-1, **_):
    """`index_scores.topk(k)`; where fewer than k keys are visible the surplus is masked anyway."""
    if k != CONFIG.index_topk:  # The router's groups, of which there is one.
      return self.tensor_topk(scores, k, dim=dim)
    mask = self.selected.popleft()
    ours = self.tensor_topk(mask.float(), k, dim=-1)
    self._compare(scores, ours.indices, mask.sum(-1) == k)
    return ours

  def router(self, scores, k, dim=-1, sorted=True):
    """`torch.topk(scores, k)` over the experts."""
    if scores.shape[-1] != CONFIG.n_routed_experts:
      return self.topk(scores, k, dim=dim, sorted=sorted)
    ours = self.experts.popleft()
    self._compare(scores, ours, self.torch.ones(scores.shape[:-1], dtype=bool))
    return scores.gather(-1, ours), ours

  def _compare(self, scores, ours, counted) -> None:
    """What the k best scores sum to, less what ours sum to: 0, or the gap of a tie."""
    scores = scores.detach().double()
    lost = self.topk(scores, ours.shape[-1]).values.sum(-1) - scores.gather(-1, ours.long()).sum(-1)
    finite = self.torch.where(self.torch.isfinite(scores), scores, 0.0)
    lost = (lost / finite.std())[counted]
    self.rows += lost.numel()
    self.gaps += lost[lost > 1e-12].tolist()


def their_curve(directory, rows: list[np.ndarray], choices, monkeypatch):
  """The same in torch, with torch's AdamW and clipping and the schedule of transformers."""
  import torch
  import transformers

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
  replay = Replay(torch)
  monkeypatch.setattr(torch.Tensor, 'topk', lambda *args, **kwargs: replay.keys(*args, **kwargs))
  monkeypatch.setattr(torch, 'topk', lambda *args, **kwargs: replay.router(*args, **kwargs))
  curve = []
  for tokens, chosen in zip(rows, choices, strict=True):
    replay.queue(*chosen)
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
  return np.array(curve), {k: v.detach().numpy() for k, v in model.named_parameters()}, replay


def test_fifty_steps_agree_with_torch(tmp_path, monkeypatch):
  """Loss to 1e-4 relative at every step, and the trained weights besides."""
  assert 0.8e6 < param_count(CONFIG) < 1.2e6 and CONFIG.index_topk < TIME
  params = init_params(CONFIG, jax.random.key(2))
  save_hf(tmp_path / 'start', CONFIG, params)
  start = tiny.fused(tiny.checkpoint_names(params, CONFIG))
  rows = batches()
  record_choices(monkeypatch)
  ours, our_params, choices = our_curve(jax.tree.map(jnp.asarray, params), rows)
  theirs, their_weights, replay = their_curve(tmp_path / 'start', rows, choices, monkeypatch)
  print(
    f'{len(replay.gaps)} of {replay.rows} choices differ, by {max(replay.gaps, default=0):.1e} std'
  )
  error = np.abs(ours / np.where(theirs == 0, 1, theirs) - (theirs != 0))
  for name, column in zip(('loss', 'gradient norm', 'learning rate'), error.T, strict=True):
    print(f'[max] {name}: {column.max():.2e} relative, at step {column.argmax()}')
  print(f'loss {theirs[0, 0]:.4f} -> {theirs[-1, 0]:.4f}, clipped {(theirs[:, 1] > 1).sum()} times')
  print('loss error by step', ' '.join(f'{e:.0e}' for e in error[:, 0]))
  assert theirs[-1, 0] < 0.8 * theirs[0, 0], 'nothing was learned, so nothing was compared'
  assert error[:, 0].max() < 1e-4
  layers, moe = CONFIG.num_hidden_layers, CONFIG.num_hidden_layers - CONFIG.first_k_dense_replace
  sparse = TIME - CONFIG.index_topk + 1
  assert replay.rows == STEPS * BATCH * (layers * sparse + moe * TIME)
  assert len(replay.gaps) < 1e-3 * replay.rows and max(replay.gaps, default=0) < 1e-3
  np.testing.assert_allclose(ours[:, 2], theirs[:, 2], rtol=0, atol=1e-6 * OPTIM['peak_lr'])

  found = tiny.fused(tiny.checkpoint_names(our_params, CONFIG))
  off = {}
  for name, weights in their_weights.items():
    moved = np.abs(weights - start[name]).max()
    # The norm in the indexer gets neither gradient nor decay; its matrices only decay.
    assert (moved == 0) == ('.indexer.k_norm.' in name), name
    off[name] = float(
      np.linalg.norm(found[name] - weights) / (np.linalg.norm(weights - start[name]) or 1.0)
    )
  worst = max(off, key=off.__getitem__)
  print(f'[max] weights, relative to how far they moved: {off[worst]:.2e} in {worst}')
  # Adam turns rounding into whole steps where a gradient is nearly zero, hence no less.
  assert off[worst] < 1e-3
