"""GLM-5's whole pre-training recipe at nano scale: dense training, longer rows, conversion to sparse.

  python -m experiments.run --config=configs/nano_pipeline.py --workdir=/tmp/pipeline

Four stages, each from the checkpoint of the one before; the same command continues what was stopped.
16 minutes on 2 CPU cores that other work shared. In bits per byte with dense and with sparse attention,
and the recall of the indexers:

  pretrain     1.631   1.738   58.8 %     rows of 256 tokens
  midtrain     1.611   1.915   23.2 %     rows of 1,024, as the stages below
  dsa_warmup   1.611   1.645   65.0 %
  dsa_sparse   1.601   1.603   64.5 %

A single stage, which then needs the run to start from:

  python -m experiments.run --config=configs/nano_pipeline.py:midtrain --workdir=/tmp/mid \
      --config.init_from=/tmp/pipeline/1_pretrain

Section numbers are those of arXiv 2602.15763; learning rates are 50 times the paper's, as suits the size.
"""

from ml_collections import ConfigDict

from configs.base import base


def get_config(stage: str = ''):
  """`python -m experiments.run --config=configs/nano_pipeline.py --workdir=DIR`."""
  c = ConfigDict()
  c.order = ('pretrain', 'midtrain', 'dsa_warmup', 'dsa_sparse')
  c.stages = ConfigDict()
  c.stages.pretrain = pretrain()
  c.stages.midtrain = midtrain()
  c.stages.dsa_warmup = dsa_warmup()
  c.stages.dsa_sparse = dsa_sparse()
  return c.stages[stage] if stage else c


def common(stage: str):
  """What all stages have in common."""
  c = base()
  c.stage = stage
  c.optim.name = 'muon_split'
  # Three MTP steps with a head each cost more than the rest of this model: a part of the rows is enough
  # to train the layer. The paper trains them on everything.
  c.train.mtp_fraction = 0.125
  c.eval.both_attentions = True
  c.eval.sample_tokens = 0
  c.checkpoint.every = 50
  return c


def pretrain():
  """Section 2.2, appendix A: dense attention, short rows, cosine, a batch that grows."""
  c = common('pretrain')
  c.model.sparse_attention = False
  c.model.rope_theta = 1e4
  c.data.seq_len = 256
  c.data.packing = 'concat'
  c.data.batch_size = 16
  c.train.grad_accum = 2
  c.train.batch_warmup_rows = 8  # The paper: from 16M to 64M tokens over the first 2 % of them.
  c.train.batch_warmup_steps = 200
  c.train.steps = 300
  c.train.switch_step = 170  # 15T of 27T tokens: MTP weight 0.3 to 0.1, balancing rate 0.001 to 0.
  c.optim.schedule = 'cosine'
  c.optim.warmup_steps = 40
  c.optim.peak_lr = 1e-2
  c.optim.end_lr = 2e-3
  c.eval.every = 100
  return c


def longer(stage: str):
  """What the stages after pre-training have in common."""
  c = common(stage)
  c.model.rope_theta = 1e6  # From 10,000, at the first switch to longer rows.
  c.model.max_position_embeddings = 4096
  c.data.seq_len = 1024  # 16 times index_topk.
  c.data.packing = 'best_fit'
  c.data.batch_size = 4
  c.train.mtp_weight = 0.1
  c.train.router_bias_rate = 0.0
  c.optim.warmup_steps = 0
  return c


def midtrain():
  """Section 2.3: longer rows, documents kept whole, a linear decay; still dense."""
  c = longer('midtrain')
  c.model.sparse_attention = False
  c.data.seed = 1
  c.train.steps = 100
  c.optim.schedule = 'linear'
  c.optim.peak_lr = 2e-3
  c.optim.end_lr = 5e-4
  c.eval.every = 50
  return c


def dsa_warmup():
  """Section 2.1.1: the indexers alone learn the dense attention's distribution; the paper's own rates."""
  c = longer('dsa_warmup')
  c.data.seed = 2
  c.train.steps = 150
  c.optim.schedule = 'linear'  # The paper gives both ends, not the shape.
  c.optim.peak_lr = 5e-3
  c.optim.end_lr = 2e-4
  c.train.indexer_loss_weight = 1.0  # The only loss here; Muon and Adam ignore its scale.
  c.eval.every = 50
  return c


def dsa_sparse():
  """Section 2.1.1: sparse attention, everything trains, at the constant rate where mid-training ended."""
  c = longer('dsa_sparse')
  c.data.seed = 3
  c.train.steps = 80
  c.optim.schedule = 'constant'
  c.optim.peak_lr = c.optim.end_lr = 5e-4
  c.eval.every = 40
  c.eval.sample_tokens = 128
  return c
