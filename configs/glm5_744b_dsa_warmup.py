"""GLM-5's conversion to sparse attention, first half: the indexers alone learn what dense attention does.

  python -m experiments.run --config=configs/glm5_744b_dsa_warmup.py --workdir=runs/glm5_744b_warmup

2.84B tokens: 1,000 steps of 14 rows of 202,752; 2.4e21 model FLOPs (train/flops.py), with dense
attention, which at 40 % of the peak of 512 TPU v5p chips would take 7 hours. Checked as a config only,
never run. Numbers without a remark are the paper's (arXiv 2602.15763, section 2.1.1 and appendix A). The
next stage is glm5_744b_dsa_sparse.py.
"""

from configs.base import base, model


def get_config():
  """`python -m experiments.run --config=configs/glm5_744b_dsa_warmup.py --workdir=DIR`."""
  c = base()
  c.stage = 'dsa_warmup'
  c.init_from = 'runs/glm5_744b_200k'
  c.model = model(
    'glm5', dtype='bfloat16', param_dtype='float32', remat='block',  # Our choice.
    expert_matmul='ragged_dot', expert_capacity=2.0,  # As in pre-training.
    attention_chunk_elements=1 << 29,  # As in mid-training.
  )  # fmt: skip
  # docs/scale.md. 14 rows are 7 times 2, so micro-batches have 2, whose devices also divide the
  # experts. Few chips are enough, without gradients and momentum of 744B parameters.
  c.mesh.expert = 2
  c.mesh.context = -1

  c.data.sources.kind = 'array_record'
  c.data.sources.path = 'data/midtrain_200k/*.array_record*'  # A placeholder; mid-training's data.
  c.data.validation_fraction = 1e-4  # Our choice.
  c.data.tokenizer.kind = 'file'
  c.data.tokenizer.path = 'data/tokenizer.json'
  c.data.packing = 'best_fit'  # As in mid-training.
  c.data.seq_len = 202752
  c.data.batch_size = 14
  c.train.grad_accum = 7
  c.data.seed = 4
  c.train.steps = 1000
  c.train.kernels = 'pallas'

  # The paper names no optimizer for the indexer: our choice is the one of everything else, without the
  # decay's pull, since 5e-3 is 25 times the rate that 0.1 was meant for.
  c.optim.name = 'muon_split'
  c.optim.momentum = 0.95
  c.optim.nesterov = True
  c.optim.ns_dtype = 'bfloat16'
  c.optim.ns_chunk = 1 << 27
  c.optim.weight_decay = 0.0
  c.optim.clip_norm = 1.0
  c.optim.schedule = 'linear'  # Our choice: the paper gives both ends, not the shape.
  c.optim.warmup_steps = 0
  c.optim.peak_lr = 5e-3
  c.optim.end_lr = 2e-4
  c.train.indexer_loss_weight = 1.0  # Our choice; the only loss, and Muon ignores its scale.
  c.train.mtp_steps = 3  # The MTP layer has an indexer as well.

  c.eval.every = 100  # Our choices from here on.
  c.eval.both_attentions = True
  c.eval.sample_tokens = 0
  c.checkpoint.every = 100
  return c
