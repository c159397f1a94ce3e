"""A run of seconds for the tests: two layers, all mechanisms, a few text files.

python -m experiments.run --config=tests/train/tiny_config.py --config.data.sources.path=DIR --workdir=DIR
"""

from configs.base import base, model


def get_config():
  c = base()
  c.model = model(
    'nano', vocab_size=292, hidden_size=32, num_hidden_layers=2, first_k_dense_replace=1,
    intermediate_size=48, moe_intermediate_size=16, n_routed_experts=4, num_attention_heads=2,
    num_key_value_heads=2, q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8,
    v_head_dim=8, index_n_heads=2, index_head_dim=8, index_topk=8,
  )  # fmt: skip
  c.data.sources.kind = 'text'
  c.data.tokenizer.kind = 'byte'
  c.data.validation_fraction = 0.3
  c.data.seq_len = 32
  c.data.batch_size = 2
  c.data.cache_dir = ''
  c.optim.warmup_steps = 4
  c.train.steps = 40
  c.train.mtp_steps = 2
  c.eval.every = 10
  c.eval.batches = 2
  c.eval.sample_tokens = 0  # Only the finished run of conftest.py asks for some.
  c.checkpoint.every = 10
  return c
