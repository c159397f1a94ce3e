"""The sections that every config has, with their defaults and what they mean.

A config file starts from `base()` and states what differs. Every key exists here, so a key that does
not is a typing mistake and an error; keys of type `placeholder` start as None, "not set".
"""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

# Every field of glm5_jax.config.ModelConfig with its type, so that --config.model.FIELD works.
MODEL_FIELDS = dict(
  model_type=str, vocab_size=int, hidden_size=int, num_hidden_layers=int, first_k_dense_replace=int,
  intermediate_size=int, moe_intermediate_size=int, n_routed_experts=int, n_shared_experts=int,
  num_experts_per_tok=int, n_group=int, topk_group=int, scoring_func=str, norm_topk_prob=bool,
  routed_scaling_factor=float, attention=str, num_attention_heads=int, num_key_value_heads=int,
  q_lora_rank=int, kv_lora_rank=int, qk_nope_head_dim=int, qk_rope_head_dim=int, v_head_dim=int,
  rope_theta=float, rope_scaling=object, max_position_embeddings=int, index_n_heads=int,
  index_head_dim=int, index_topk=int, indexer_types=tuple, indexer_rope=str,
  num_nextn_predict_layers=int, index_share_for_mtp_iteration=bool, rms_norm_eps=float,
  initializer_range=float, eos_token_id=tuple, pad_token_id=int, latent_norm_eps=float,
  index_norm_eps=float, sparse_attention=bool, dtype=str, param_dtype=str, remat=str,
  offload_inputs=bool, scan_unroll=int, expert_matmul=str, expert_capacity=float, expert_overflow=str,
  attention_chunk_elements=int,
)  # fmt: skip


def model(size: str, **changes) -> ConfigDict:
  """A named size of glm5_jax/config.py with changes; fields left at None keep the size's value."""
  config = ConfigDict({'size': size})
  for name, kind in MODEL_FIELDS.items():
    config[name] = placeholder(kind)
  config.lock()  # So that a misspelt change is an error here already.
  config.update(changes)
  return config


def base() -> ConfigDict:
  """All sections. See the comments for units."""
  c = ConfigDict()
  # pretrain | midtrain | dsa_warmup | dsa_sparse: what trains, with which attention (train/stages.py).
  c.stage = 'pretrain'
  # Folder of the run whose parameters (newest checkpoint) and tokenizer this one starts from. Everything
  # else starts anew. '' starts from random parameters.
  c.init_from = ''
  c.seed = 0  # Of the initial parameters; data.seed is that of the data order.

  c.model = model('nano')

  # Devices along each axis (glm5_jax/sharding.py); one may be -1, what the others leave. All 1: one
  # device.
  c.mesh = ConfigDict()
  c.mesh.data = 1  # Rows of the batch.
  c.mesh.fsdp = 1  # Rows, and parameters with their gradients and optimizer state.
  c.mesh.expert = 1  # Rows, and experts.
  c.mesh.context = 1  # The sequence.
  c.mesh.tensor = 1  # Heads, feed-forward width, vocabulary.

  # See glm5_jax/data/config.py for all choices. A config for a mixture replaces `sources` by a tuple of
  # such dicts (`del c.data.sources` first); the command line can change a single one by its keys.
  c.data = ConfigDict()
  c.data.sources = ConfigDict()
  c.data.sources.kind = 'stdlib'  # stdlib | text | jsonl | parquet | array_record
  c.data.sources.path = ''  # File, folder or glob pattern; stdlib needs none.
  c.data.sources.field = 'text'  # Key or column with the text.
  c.data.sources.separator = ''  # text: what separates documents within a file.
  c.data.sources.licence = ''  # Quoted in the report.
  c.data.validation_sources = ()  # By default a part of `sources` is held out:
  c.data.validation_fraction = 0.05
  c.data.tokenizer = ConfigDict()
  c.data.tokenizer.kind = 'bpe'  # bpe (trained on the training files) | byte | file
  c.data.tokenizer.vocab_size = 4096  # bpe; at most model.vocab_size.
  c.data.tokenizer.path = ''  # file: a tokenizer.json.
  c.data.seq_len = 512
  c.data.batch_size = 8  # Rows.
  c.data.packing = 'concat'  # concat | first_fit | best_fit
  c.data.long_documents = 'split'  # split | skip | fatal
  c.data.objective = 'next_token'  # next_token | infilling (GLM's; needs best_fit, no MTP steps)
  c.data.infilling = ConfigDict()  # What infilling hides, see InfillingConfig in data/config.py:
  c.data.infilling.span_prob = 0.3  # short spans, or
  c.data.infilling.sentence_prob = 0.0  # sentences, or else
  c.data.infilling.suffix_prob = 1.0  # the end of the text (0: one long span anywhere).
  c.data.infilling.mask_ratio = 0.15  # Of the tokens, hidden by spans.
  c.data.fim_rate = 0.0  # Of the training documents: rearranged for fill-in-the-middle.
  c.data.fim_spm_rate = 0.0  # Of those: with the suffix first.
  c.data.on_bad = 'skip'  # Bad documents: skip (and report) | fatal.
  c.data.seed = 0
  c.data.prefetch = 4  # Batches made ahead.
  c.data.cache_dir = '~/.cache/glm5_jax'  # Tokenizers and tokens; '' for none.

  c.optim = ConfigDict()
  c.optim.name = 'adamw'  # muon_split | muon | adamw; see glm5_jax/optim/rules.py.
  c.optim.peak_lr = 1e-3
  c.optim.end_lr = 1e-4
  c.optim.warmup_steps = 100  # Linear from 0.
  c.optim.schedule = 'cosine'  # From peak_lr to end_lr over the remaining train.steps.
  c.optim.b1 = 0.9
  c.optim.b2 = 0.95
  c.optim.eps = 1e-8
  c.optim.weight_decay = 0.1  # Of matrices; norms and biases are exempt.
  c.optim.clip_norm = 1.0  # Of the global gradient norm.
  # For name = muon_split or muon, which use b1, b2 and eps for what is no matrix.
  c.optim.momentum = 0.95
  c.optim.nesterov = True  # The paper is silent; public implementations have it.
  c.optim.ns_dtype = 'float32'  # Of Newton-Schulz: float32 | bfloat16.
  c.optim.ns_chunk = (
    1 << 18
  )  # Elements it works on at once: a CPU core's cache; accelerators 2**27.

  # Conversations to learn from besides data.sources, or instead: a teacher's on the tasks of
  # glm5_jax/envs (math, tool, lookup, code), written into the run's folder.
  c.demonstrations = ConfigDict()
  c.demonstrations.environments = ()
  c.demonstrations.count = 2000  # Conversations about each.
  c.demonstrations.tasks = 1  # In one conversation.

  c.train = ConfigDict()
  c.train.steps = 1000
  c.train.max_minutes = placeholder(float)  # Stop then, with a report; 0 is no limit.
  c.train.grad_accum = 1  # Micro-batches a step; each has data.batch_size / grad_accum rows.
  c.train.batch_warmup_rows = 0  # Rows of the first batch, in micro-batches; 0: all at once.
  c.train.batch_warmup_steps = 0  # From there to data.batch_size, linearly.
  c.train.mtp_steps = 3  # Tokens beyond the next one, learnt by one shared layer (section 2.1).
  c.train.mtp_fraction = 1.0  # Of the batch's rows on which those steps are trained.
  c.train.mtp_weight = 0.3  # Of the mean MTP loss.
  c.train.router_bias_rate = 0.001  # Bias-based load balancing: step of the correction bias.
  c.train.switch_step = 0  # From this step on the two values below hold instead; 0: never.
  c.train.late_mtp_weight = 0.1
  c.train.late_router_bias_rate = 0.0
  c.train.balance_loss_weight = 1e-4  # Of the sequence-wise balance loss.
  # Of the indexer's KL. It trains nothing else and Adam ignores its scale, but the global gradient norm
  # does not: at 1 the indexer's gradient decides how far everything else is clipped.
  c.train.indexer_loss_weight = 0.01
  # Gradual sparsity: sparse attention keeps all keys at first and model.index_topk after these steps.
  c.train.topk_anneal_steps = 0
  c.train.z_loss = 0.0
  c.train.kernels = 'reference'  # Of sparse attention; 'pallas' on TPUs.
  c.train.max_consecutive_skips = 10  # Stop after this many non-finite steps in a row.

  c.eval = ConfigDict()
  c.eval.every = 100  # Steps.
  c.eval.batches = 8  # Of the held-out files while training; the report uses all of them.
  c.eval.both_attentions = False  # In the end, also with the attention the stage does not use.
  c.eval.overlap = 0  # Tokens of context that the next piece of a long document repeats.
  c.eval.prompt = ''  # For the report's samples; by default a piece of a held-out document.
  c.eval.sample_tokens = 128  # 0 for none.

  c.checkpoint = ConfigDict()
  c.checkpoint.every = 500  # Steps; besides, the last step and every new best evaluation.
  c.checkpoint.keep_last = 2
  c.checkpoint.keep_best = 1  # By held-out loss; 0 neither keeps nor writes them.

  c.log = ConfigDict()
  c.log.every = 1  # Steps between rows of metrics.jsonl.
  return c
