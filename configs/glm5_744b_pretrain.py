"""GLM-5's pre-training: 744B parameters, 27T tokens in rows of 4,096.

  python -m experiments.run --config=configs/glm5_744b_pretrain.py --workdir=runs/glm5_744b_pretrain

27.0T tokens in 406,802 steps; 8.1e24 model FLOPs (train/flops.py), which at 40 % of the peak of 8,192
TPU v5p chips would take 62 days. Checked as a config only, never run. Numbers without a remark are the
paper's (arXiv 2602.15763, section 2.2 and appendix A) or, where it refers to GLM-4.5, that paper's (arXiv
2508.06471, section 2.4). The next stage is glm5_744b_midtrain.py.
"""

from configs.base import base, model


def get_config():
  """`python -m experiments.run --config=configs/glm5_744b_pretrain.py --workdir=DIR`."""
  c = base()
  c.stage = 'pretrain'
  c.model = model(
    'glm5',
    rope_theta=1e4,
    sparse_attention=False,  # The sparse attention comes by conversion after mid-training.
    dtype='bfloat16',  # Our choice, as is all of this block: the paper gives no precisions.
    param_dtype='float32',
    remat='block_but_attention',
    expert_matmul='ragged_dot',
    expert_capacity=2.0,  # Of what a device receives at an even load.
  )
  c.mesh.fsdp = -1  # docs/scale.md. Whatever number of chips divides a micro-batch's 2,048 rows.
  c.mesh.expert = 8

  # The paper has 18T tokens of a general corpus, then 9T of code and reasoning. Our choice is both at
  # once in that ratio, since one run has one mixture here. Paths are placeholders.
  del c.data.sources
  c.data.sources = (
    {'kind': 'array_record', 'path': 'data/general/*.array_record*', 'weight': 18.0, 'fim': False},
    {'kind': 'array_record', 'path': 'data/code_reasoning/*.array_record*', 'weight': 9.0},
  )
  c.data.validation_fraction = 1e-5  # Our choice.
  c.data.tokenizer.kind = 'file'
  c.data.tokenizer.path = 'data/tokenizer.json'  # GLM-5's own; 154,880 rows of the embedding.
  c.data.fim_rate = 0.5  # Of the source code; GLM-4.5 gives no rate, so our choice.
  c.data.packing = 'concat'  # Random truncation.
  c.data.seq_len = 4096

  # 16M tokens, linearly (our choice of shape) to 64M over the first 500B; powers of two are our choice.
  c.data.batch_size = 16384  # Rows: 64 Mi tokens.
  # Our choice: micro-batches of 8 Mi tokens, which 1,024 v5p chips have room for. Every one of them sends
  # all weights and gradients.
  c.train.grad_accum = 8
  c.train.batch_warmup_rows = 4096  # 16 Mi tokens.
  c.train.batch_warmup_steps = 11922  # 0.50T tokens.
  c.train.steps = 406802  # 27T tokens.

  c.optim.name = 'muon_split'
  c.optim.momentum = 0.95
  c.optim.nesterov = True  # Our choice: public implementations have it.
  c.optim.ns_dtype = 'bfloat16'  # Our choice.
  c.optim.ns_chunk = 1 << 27  # Our choice, for accelerators.
  c.optim.weight_decay = 0.1
  c.optim.clip_norm = 1.0  # Our choice, customary.
  c.optim.schedule = 'cosine'
  c.optim.warmup_steps = 2000  # Our choice: the paper says that there is a warm-up, not how long.
  c.optim.peak_lr = 2e-4
  c.optim.end_lr = 4e-5

  c.train.kernels = 'pallas'
  c.train.mtp_steps = 3
  c.train.balance_loss_weight = 1e-4
  # GLM-4.5 switches after 15T tokens, its general corpus. GLM-5's has 18T (step 272,692); whether the
  # switch moved as well is not said. Our choice: it did not.
  c.train.switch_step = 227989
  c.train.mtp_weight = 0.3
  c.train.late_mtp_weight = 0.1
  c.train.router_bias_rate = 0.001
  c.train.late_router_bias_rate = 0.0

  c.eval.every = 1000  # Our choices from here on.
  c.eval.sample_tokens = 0
  c.checkpoint.every = 500
  return c
