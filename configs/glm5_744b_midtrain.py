"""GLM-5's mid-training: 32K, then 128K, then 200K tokens a row; 1.55T tokens.

  python -m experiments.run --config=configs/glm5_744b_midtrain.py:32k --workdir=runs/glm5_744b_32k
  python -m experiments.run --config=configs/glm5_744b_midtrain.py:128k --workdir=runs/glm5_744b_128k
  python -m experiments.run --config=configs/glm5_744b_midtrain.py:200k --workdir=runs/glm5_744b_200k

1T, 500B and 50B tokens; 5.3e23, 6.6e23 and 9.4e22 model FLOPs (train/flops.py), with dense attention. At
40 % of the peak of 8,192 TPU v5p chips that would be 4, 5 and 1 days. Checked as configs only, never run.
Numbers without a remark are the paper's (arXiv 2602.15763, section 2.3 and appendix A).
"""

from configs.base import base, model

# Row length, rows a step, steps, the run before, tokens of mid-training at the start and at the end;
# devices that share a row, and micro-batches.
# The batch of 64 Mi tokens at the end of pre-training stays, up to whole rows (320 of them at 200K, which
# divides well). The paper only says that it is constant after the first 500B tokens of pre-training.
STAGES = {
  '32k': (32768, 2048, 14901, 'pretrain', 0.0, 1e12, 8, 8),
  '128k': (131072, 512, 7451, '32k', 1e12, 1.5e12, 32, 8),
  '200k': (202752, 320, 771, '128k', 1.5e12, 1.55e12, 32, 10),
}


def get_config(stage: str = '32k'):
  """`python -m experiments.run --config=configs/glm5_744b_midtrain.py:32k --workdir=DIR`."""
  if stage not in STAGES:
    raise ValueError(f'unknown stage {stage!r}, known are {list(STAGES)}')
  length, rows, steps, before, start, end, context, micro_batches = STAGES[stage]
  c = base()
  c.stage = 'midtrain'
  c.init_from = f'runs/glm5_744b_{before}'
  c.model = model(
    'glm5', sparse_attention=False, dtype='bfloat16', param_dtype='float32',
    remat='block_but_attention',
    rope_theta=1e6,  # From 10,000, at the 32K stage (GLM-4.5).
    expert_matmul='ragged_dot', expert_capacity=2.0,  # As in pre-training.
    # Without kernels, scores of a chunk of queries: enough to use a matrix unit, and 2 GiB.
    attention_chunk_elements=1 << 29,
  )  # fmt: skip
  # docs/scale.md. 4,096 tokens of a row on a device, 6,336 at 200K. No more devices to a row than that
  # needs, since each makes the keys and values of the whole row. On 1,024 devices those of a row have two
  # rows of a micro-batch, one at 200K.
  c.mesh.fsdp = -1
  c.mesh.expert = 8
  c.mesh.context = context

  # Placeholders for repositories, reasoning data, long documents and agents' trajectories.
  c.data.sources.kind = 'array_record'
  c.data.sources.path = f'data/midtrain_{stage}/*.array_record*'
  c.data.validation_fraction = 1e-4  # Our choice.
  c.data.tokenizer.kind = 'file'
  c.data.tokenizer.path = 'data/tokenizer.json'
  c.data.packing = 'best_fit'  # From mid-training on (GLM-4.5).
  c.data.seq_len = length
  c.data.batch_size = rows
  c.data.seed = list(STAGES).index(stage) + 1
  c.train.grad_accum = micro_batches  # Our choice: of 6 to 8 Mi tokens each.
  c.train.steps = steps

  c.optim.name = 'muon_split'
  c.optim.momentum = 0.95
  c.optim.nesterov = True  # Our choice, as in pre-training; so are the next two, and the clipping.
  c.optim.ns_dtype = 'bfloat16'
  c.optim.ns_chunk = 1 << 27
  c.optim.clip_norm = 1.0
  c.optim.weight_decay = 0.1
  # 4e-5 to 1e-5 linearly. Our choice: one line through all three stages, by tokens.
  c.optim.schedule = 'linear'
  c.optim.warmup_steps = 0
  c.optim.peak_lr = 4e-5 - 3e-5 * start / 1.55e12
  c.optim.end_lr = 4e-5 - 3e-5 * end / 1.55e12

  c.train.kernels = 'pallas'
  c.train.mtp_steps = 3
  c.train.mtp_weight = 0.1  # As since 15T tokens (GLM-4.5), and the balancing rate.
  c.train.router_bias_rate = 0.0
  c.train.balance_loss_weight = 1e-4

  c.eval.every = 100  # Our choices from here on.
  c.eval.sample_tokens = 0
  c.checkpoint.every = 100
  return c
