"""GLM-5's conversion to sparse attention, second half: everything adapts to 2,048 selected keys.

  python -m experiments.run --config=configs/glm5_744b_dsa_sparse.py --workdir=runs/glm5_744b_sparse

20B tokens in 308 steps; 1.0e22 model FLOPs (train/flops.py), which at 40 % of the peak of 512 TPU v5p
chips would take 30 hours. Checked as a config only, never run. Numbers without a remark are the paper's
(arXiv 2602.15763, section 2.1.1 and appendix A).

The alternative of a selection that shrinks from all keys, without a switch:
--config.train.topk_anneal_steps=100. It attends to all keys and masks, so it is for shorter rows.
"""

from configs.base import base, model


def get_config():
  """`python -m experiments.run --config=configs/glm5_744b_dsa_sparse.py --workdir=DIR`."""
  c = base()
  c.stage = 'dsa_sparse'
  c.init_from = 'runs/glm5_744b_warmup'
  c.model = model(
    'glm5', index_topk=2048,
    dtype='bfloat16', param_dtype='float32', remat='block',  # Our choice.
    expert_matmul='ragged_dot', expert_capacity=2.0,  # As in pre-training.
    attention_chunk_elements=1 << 29,  # As in mid-training, and so the mesh.
  )  # fmt: skip
  c.mesh.fsdp = -1
  c.mesh.expert = 8
  c.mesh.context = 32

  c.data.sources.kind = 'array_record'
  c.data.sources.path = 'data/midtrain_200k/*.array_record*'  # A placeholder; mid-training's data.
  c.data.validation_fraction = 1e-4  # Our choice.
  c.data.tokenizer.kind = 'file'
  c.data.tokenizer.path = 'data/tokenizer.json'
  c.data.packing = 'best_fit'
  c.data.seq_len = 202752
  c.data.batch_size = 320  # "Hyper-parameters of mid-training": the batch of our 200K stage.
  c.data.seed = 5
  c.train.grad_accum = 5  # Our choice: 12 Mi tokens each. Dense attention takes more memory.
  c.train.steps = 308

  c.optim.name = 'muon_split'
  c.optim.momentum = 0.95
  c.optim.nesterov = True  # Our choice, as in pre-training; so are the next two, and the clipping.
  c.optim.ns_dtype = 'bfloat16'
  c.optim.ns_chunk = 1 << 27
  c.optim.clip_norm = 1.0
  c.optim.weight_decay = 0.1
  c.optim.schedule = 'constant'
  c.optim.warmup_steps = 0
  c.optim.peak_lr = c.optim.end_lr = 1e-5

  c.train.indexer_loss_weight = 0.01  # Our choice: see docs/decisions.md.
  c.train.kernels = 'pallas'
  c.train.mtp_steps = 3
  c.train.mtp_weight = 0.1  # As at the end of mid-training.
  c.train.router_bias_rate = 0.0
  c.train.balance_loss_weight = 1e-4

  c.eval.every = 50  # Our choices from here on.
  c.eval.both_attentions = True
  c.eval.sample_tokens = 0
  c.checkpoint.every = 50
  return c
