"""From a run config to the parts of a run; whatever a person can get wrong in it is found here."""

import dataclasses
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import optax
from jax.sharding import Mesh

from glm5_jax import config as model_configs
from glm5_jax import data
from glm5_jax.envs import catalogue
from glm5_jax.modules.model import abstract_params
from glm5_jax.optim.build import build
from glm5_jax.optim.schedules import Schedule
from glm5_jax.quant.int4 import Int4
from glm5_jax.quant.training import quantised
from glm5_jax.train import placement, stages
from glm5_jax.train.batches import Plan
from glm5_jax.train.step import Objective


class ConfigError(ValueError):
  """The config asks for something impossible. The message is for people."""


class Parts(NamedTuple):
  """The parts of a run that depend on the config alone."""

  model: model_configs.ModelConfig
  objective: Objective
  optimizer: tuple[optax.GradientTransformation, Schedule]
  data: data.DataConfig
  plan: Plan


def prepare(config: Mapping[str, Any]) -> Parts:
  """The parts of a run.

  Raises:
    ConfigError: a value is impossible.
  """
  positive = (
    ('train', 'steps'), ('train', 'max_consecutive_skips'), ('eval', 'every'), ('eval', 'batches'),
    ('checkpoint', 'every'), ('checkpoint', 'keep_last'), ('log', 'every'),
  )  # fmt: skip
  for section, key in positive:
    if config[section][key] < 1:
      raise ConfigError(f'{section}.{key}={config[section][key]} must be at least 1')
  train = config['train']
  for key in ('switch_step', 'mtp_steps', 'indexer_loss_weight'):
    if train[key] < 0:
      raise ConfigError(f'train.{key}={train[key]} must be at least 0')
  if not 0 < train['mtp_fraction'] <= 1:
    raise ConfigError(f'train.mtp_fraction={train["mtp_fraction"]} must be above 0 and at most 1')
  if config['optim']['peak_lr'] <= 0:
    raise ConfigError(f'optim.peak_lr={config["optim"]["peak_lr"]} must be positive')
  if config['data'].get('objective') == 'infilling' and train['mtp_steps']:
    raise ConfigError(
      "data.objective='infilling' hides tokens out of order, which MTP steps cannot predict: set"
      ' train.mtp_steps=0'
    )
  try:
    asked = config['model'].get('sparse_attention')
    model, stage = stages.resolve(config['stage'], build_model_config(config['model']), asked)
    parts = Parts(
      model,
      Objective.from_config(train, stage),
      _optimizer(config, model),
      data.DataConfig.from_mapping(config['data']),
      plan_of(config, model),
    )
  except (ValueError, TypeError) as e:
    raise ConfigError(str(e)) from e
  _check_stage(config, parts)
  dense_kernels = parts.objective.kernels == 'pallas' and not parts.model.sparse_attention
  if config['data'].get('objective') == 'infilling' and dense_kernels:
    raise ConfigError(
      "data.objective='infilling' has a bidirectional part, and dense attention by kernels is causal: set"
      " train.kernels='reference'"
    )
  return parts


def _optimizer(
  config: Mapping[str, Any], model: model_configs.ModelConfig
) -> tuple[optax.GradientTransformation, Schedule]:
  """What the `optim` section asks for, in INT4 where it has an `int4_group`."""
  optim = config['optim']
  tx, schedule = build(optim, config['train']['steps'])
  if not optim.get('int4_group'):
    return tx, schedule
  int4 = Int4(optim['int4_group'], optim['int4_parameters'])
  int4.check(abstract_params(model))
  return quantised(tx, int4), schedule


def prepare_mesh(
  config: Mapping[str, Any], parts: Parts, devices: Sequence[jax.Device] | None = None
) -> Mesh | None:
  """The mesh of a run on `devices`, by default those that there are; None for a run on one device.

  Raises:
    ConfigError: there are not as many devices, or they cannot divide the run.
  """
  try:
    mesh = placement.mesh_of(config['mesh'], devices)
    if mesh:
      placement.check(mesh, parts.model, parts.objective, parts.plan)
  except ValueError as e:
    raise ConfigError(str(e)) from e
  return mesh


def plan_of(config: Mapping[str, Any], model: model_configs.ModelConfig) -> Plan:
  """The sizes of every step.

  Raises:
    ValueError: sizes that do not go together.
  """
  train = config['train']
  return Plan(
    rows=config['data']['batch_size'],
    micro_batches=train['grad_accum'],
    first_rows=train['batch_warmup_rows'],
    warmup_steps=train['batch_warmup_steps'],
    seq_len=config['data']['seq_len'],
    topk=model.index_topk if model.sparse_attention and model.attention == 'mla' else None,
    anneal_steps=train['topk_anneal_steps'],
  )


def _check_stage(config: Mapping[str, Any], parts: Parts) -> None:
  train, stage = config['train'], parts.objective.stage
  if not stage.main and not parts.objective.indexer_loss:
    raise ConfigError(
      f'stage {config["stage"]!r} trains by train.indexer_loss_weight alone; it must be positive'
    )
  if config['stage'] != 'pretrain' and not config['init_from']:
    raise ConfigError(
      f'stage {config["stage"]!r} continues a trained model: set --config.init_from to the folder of'
      ' the run before'
    )
  steps = train['topk_anneal_steps']
  if not 0 <= steps < train['steps']:
    raise ConfigError(
      f'train.topk_anneal_steps={steps} must be at least 0 and below train.steps={train["steps"]}, so'
      ' that the run ends with model.index_topk'
    )
  if steps and (parts.model.shares_selection or parts.model.index_share_for_mtp_iteration):
    raise ConfigError(
      'train.topk_anneal_steps needs every layer to have an indexer (no IndexShare)'
    )


def build_model_config(section: Mapping[str, Any]) -> model_configs.ModelConfig:
  """The ModelConfig that a config's `model` section means: a size, and every field that is set.

  Raises:
    ValueError: an unknown size or an impossible combination.
  """
  changes = {k: v for k, v in section.items() if k != 'size' and v is not None}
  if changes.get('expert_matmul') == 'rounds':
    raise ValueError("expert_matmul='rounds' has no gradient: train with 'blocks' or 'ragged_dot'")
  if isinstance(changes.get('rope_scaling'), Mapping):
    changes['rope_scaling'] = model_configs.Yarn(**changes['rope_scaling'])
  return model_configs.from_size(section['size'], **changes)


def with_demonstrations(
  config: data.DataConfig, section: Mapping[str, Any], folder: pathlib.Path
) -> data.DataConfig:
  """The data with a teacher's demonstrations, one source an environment, as `demonstrations` asks.

  They take the place of the standard library, which is what `data.sources` is by default.

  Raises:
    ConfigError: an environment is unknown.
  """
  if not section['environments']:
    return config
  try:
    paths = catalogue.write_demonstrations(
      folder / 'demonstrations',
      section['environments'],
      section['count'],
      section['tasks'],
      config.seed,
    )
  except ValueError as e:
    raise ConfigError(f'demonstrations.{e}') from None
  sources = [s for s in config.sources if s.kind != 'stdlib']
  sources += [data.SourceConfig('chat', str(path), name=path.stem) for path in paths]
  return dataclasses.replace(config, sources=tuple(sources))


def fit_to_tokenizer(
  model: model_configs.ModelConfig, tokenizer: data.Tokenizer
) -> model_configs.ModelConfig:
  """The model, ending documents as the tokenizer does.

  Raises:
    ConfigError: the tokenizer has more tokens than the model.
  """
  if tokenizer.vocab_size > model.vocab_size:
    raise ConfigError(
      f'the tokenizer has {tokenizer.vocab_size} tokens and the model an embedding of'
      f' {model.vocab_size}: set --config.model.vocab_size={tokenizer.vocab_size} or more'
    )
  return model if model.eos_token_id else model.replace(eos_token_id=(tokenizer.eot_id,))


def plain(config: Mapping[str, Any]) -> dict[str, Any]:
  """The config as JSON-able dicts and lists."""
  to_dict = getattr(config, 'to_dict', None)
  return json.loads(json.dumps(to_dict() if to_dict else config, default=list))
