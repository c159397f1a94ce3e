"""GLM-5's supervised fine-tuning: chat, reasoning, coding and agents, in rows of 202,752 tokens.

  python -m experiments.run --config=configs/glm5_744b_sft.py --workdir=runs/glm5_744b_sft

13.0B tokens in 1,000 steps; 6.6e21 model FLOPs (train/flops.py) if every row were one conversation and
fewer otherwise, which at 40 % of the peak of 512 TPU v5p chips would take 19 hours. Checked as a config
only, never run. Numbers without a remark are the paper's (arXiv 2602.15763, section 3.1), which are few: the
length of a row, the three categories, the modes of thinking, that mistakes in a trajectory are not learnt,
and INT4 (section 2.4). The next stage is glm5_744b_reasoning_rl.py.
"""

from configs.base import base, model


def get_config():
  """`python -m experiments.run --config=configs/glm5_744b_sft.py --workdir=DIR`."""
  c = base()
  c.stage = 'sft'
  c.init_from = 'runs/glm5_744b_sparse'
  c.model = model(
    'glm5', index_topk=2048,
    dtype='bfloat16', param_dtype='float32', remat='block',  # Our choice.
  )  # fmt: skip

  # Placeholders, in equal parts (our choice). Reasoning is interleaved with answers and calls everywhere;
  # coding agents preserve it across turns; a conversation says turn by turn whether the model thinks. A
  # message with `weight` 0 is a mistake: context, but not learnt.
  del c.data.sources
  c.data.sources = (
    {'kind': 'chat', 'path': 'data/sft/chat/*.jsonl', 'name': 'chat', 'clear_thinking': True},
    {
      'kind': 'chat',
      'path': 'data/sft/reasoning/*.jsonl',
      'name': 'reasoning',
      'clear_thinking': True,
    },
    {'kind': 'chat', 'path': 'data/sft/agents/*.jsonl', 'name': 'agents', 'clear_thinking': False},
  )
  c.data.validation_fraction = 1e-3  # Our choice.
  c.data.tokenizer.kind = 'file'
  c.data.tokenizer.path = 'data/tokenizer.json'
  c.data.packing = 'best_fit'  # Our choice, as in mid-training: conversations stay whole.
  c.data.long_documents = 'skip'  # Our choice: half a conversation teaches the wrong thing.
  c.data.seq_len = 202752
  c.data.batch_size = 64  # Our choices: batch, steps and seed.
  c.data.seed = 6
  c.train.grad_accum = 16
  c.train.steps = 1000

  # The experts are trained in INT4: by the function that quantises them for inference, so that what was
  # trained is what is served, bit for bit. Group and matrices are our choice, as public recipes have it.
  c.optim.int4_group = 32
  c.optim.int4_parameters = 'experts/w_(gate|up|down)'

  # The paper names neither optimizer nor rates. Our choice: Muon Split goes on, from the rate at which
  # the conversion ended down to a tenth of it.
  c.optim.name = 'muon_split'
  c.optim.momentum = 0.95
  c.optim.nesterov = True
  c.optim.ns_dtype = 'bfloat16'
  c.optim.ns_chunk = 1 << 27
  c.optim.clip_norm = 1.0
  c.optim.weight_decay = 0.1
  c.optim.schedule = 'cosine'
  c.optim.warmup_steps = 50
  c.optim.peak_lr = 1e-5
  c.optim.end_lr = 1e-6

  # Our choices: the experts' balance is left alone (public recipes for GLM-5 have no balance loss and no
  # bias update after pre-training), and MTP goes on as before.
  c.train.mtp_steps = 3
  c.train.mtp_weight = 0.1
  c.train.router_bias_rate = 0.0
  c.train.balance_loss_weight = 0.0
  c.train.indexer_loss_weight = 0.01

  c.eval.every = 100  # Our choices from here on.
  c.eval.sample_tokens = 0
  c.checkpoint.every = 100
  return c
