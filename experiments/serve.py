"""Serves a model, OpenAI-compatible: `python -m experiments.serve --checkpoint=DIR --port=8000`.

DIR is the folder of a run of this project (the newest usable checkpoint is taken), or a Hugging
Face checkpoint: config.json, *.safetensors and tokenizer.json. The page at http://127.0.0.1:8000/
talks to the model. SIGTERM or Ctrl-C lets requests under way finish, then ends with exit status 0.
What a person can get wrong ends in one line and exit status 2. docs/serving.md has the endpoints.
"""

import json
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

from absl import flags

USAGE = 'usage: python -m experiments.serve --checkpoint=DIR [--port=8000]'
CHAT_FORMATS = ('5', '5.1', '5.2')


class UsageError(Exception):
  """Something on the command line or in the folder; the message is one line."""


def _define() -> flags.FlagValues:
  values = flags.FlagValues()
  flags.DEFINE_string(
    'checkpoint', None, 'Folder of a run, or of a Hugging Face checkpoint.', values
  )
  flags.DEFINE_string('host', '127.0.0.1', 'Address to listen on; others than loopback let other'
                      ' machines in.', values)  # fmt: skip
  flags.DEFINE_integer('port', 8000, 'Port; 0 takes a free one.', 0, 65535, values)
  flags.DEFINE_string(
    'name', None, "The model's name for clients; by default the folder's.", values
  )
  flags.DEFINE_string('api_key_file', None, 'File with the key that clients must send.', values)
  flags.DEFINE_enum('chat_format', '5', CHAT_FORMATS, 'Whose chat template.', values)
  flags.DEFINE_integer('max_length', 0, 'Tokens of prompt and answer; 0 is as many as fit.', 0,
                       flag_values=values)  # fmt: skip
  flags.DEFINE_integer('max_new_tokens', 0, 'Tokens of an answer; 0 is as many as fit.', 0,
                       flag_values=values)  # fmt: skip
  flags.DEFINE_integer('max_sequences', 16, 'Answers generated at a time.', 1, flag_values=values)
  flags.DEFINE_integer('max_requests', 64, 'Answers generated and waiting; then 429.', 1,
                       flag_values=values)  # fmt: skip
  flags.DEFINE_integer('pages', 1025, 'Pages of the cache, 64 tokens each.', 2, flag_values=values)
  flags.DEFINE_integer('draft_steps', 0, 'Tokens drafted by the MTP layer.', 0, 7, values)
  flags.DEFINE_integer('tensor', 1, 'Devices of this machine that divide the model among them.', 1,
                       flag_values=values)  # fmt: skip
  flags.DEFINE_enum('kernels', 'reference', ('reference', 'pallas'),
                    'Of attention: plain jax, or the TPU kernels.', values)  # fmt: skip
  flags.DEFINE_integer('max_body_mb', 8, 'Megabytes of a request.', 1, flag_values=values)
  flags.DEFINE_float('timeout', 600.0, 'Seconds for an answer.', 0.001, flag_values=values)
  flags.DEFINE_integer('drain_seconds', 30, 'Seconds to finish in when told to end.', 1,
                       flag_values=values)  # fmt: skip
  return values


def parse(argv: Sequence[str]) -> flags.FlagValues:
  """The flags.

  Raises:
    UsageError: unknown flag (names the nearest), bad value, no checkpoint.
  """
  values = _define()
  try:
    rest = values(argv)
  except flags.Error as e:
    raise UsageError(' '.join(str(e).split())) from None
  if len(rest) > 1:
    raise UsageError(f'unexpected argument {rest[1]!r}; {USAGE}')
  if not values.checkpoint:
    raise UsageError(f'--checkpoint is missing; {USAGE}')
  return values


def kind_of(folder: pathlib.Path) -> str:
  """What a folder holds: 'run' or 'hf'.

  Raises:
    UsageError: neither; says what is there instead.
  """
  if not folder.is_dir():
    raise UsageError(f'--checkpoint={folder} is not a folder')
  config = _json(folder / 'config.json')
  stages = config.get('order', ()) if isinstance(config, dict) else ()
  runs = sorted(p.parent for p in folder.glob('*/checkpoints'))
  if (folder / 'checkpoints').is_dir() and isinstance(config, dict) and 'model' in config:
    kind = 'run'
  elif any(folder.glob('*.safetensors')) and isinstance(config, dict):
    kind = 'hf'
  elif stages and runs:
    raise UsageError(f'--checkpoint={folder} is a pipeline; name one stage, such as {runs[-1]}')
  else:
    raise UsageError(
      f'--checkpoint={folder} is neither the folder of a run (config.json, checkpoints/) nor a'
      ' Hugging Face checkpoint (config.json, *.safetensors)'
    )
  if not (folder / 'tokenizer.json').is_file():
    raise UsageError(
      f'--checkpoint={folder} has no tokenizer.json; copy the one it was trained with'
    )
  return kind


def _json(file: pathlib.Path) -> Any:
  try:
    return json.loads(file.read_text(encoding='utf-8'))
  except (OSError, ValueError):
    return None


def load(folder: pathlib.Path, mesh: Any = None) -> tuple[Any, Any, Any, int]:
  """(params, ModelConfig, tokenizer, version of the weights) of a folder; each shard to its device.

  A run's version is the step of its checkpoint, a Hugging Face checkpoint's is 0.

  Raises:
    UsageError, and the errors of the loaders: there is no usable checkpoint.
  """
  from glm5_jax import sharding
  from glm5_jax.convert import load_hf
  from glm5_jax.data import load_tokenizer
  from glm5_jax.modules.model import abstract_params
  from glm5_jax.train.handover import Handover
  from glm5_jax.train.prepare import build_model_config, fit_to_tokenizer
  from glm5_jax.train.stages import STAGES, resolve

  kind = kind_of(folder)
  tokenizer = load_tokenizer(folder)
  if kind == 'hf':
    model, params = load_hf(folder, mesh)
    return params, fit_to_tokenizer(model, tokenizer), tokenizer, 0
  config = _json(folder / 'config.json')
  model = build_model_config(config['model'])
  if config.get('stage') in STAGES:  # A stage may have trained with another attention.
    model, _ = resolve(config['stage'], model, config['model'].get('sparse_attention'))
  model = fit_to_tokenizer(model, tokenizer)
  like = abstract_params(model)
  like = sharding.abstract_params(like, mesh) if mesh else like
  step, params = Handover(str(folder), model).params(like)
  if None in _leaves(params):
    raise UsageError(f"--checkpoint={folder}: the checkpoint lacks the model's indexers")
  return params, model, tokenizer, step


def _leaves(tree: Any) -> list[Any]:
  """Leaves of nested dicts, None among them."""
  return [x for v in tree.values() for x in _leaves(v)] if isinstance(tree, dict) else [tree]


def _key(file: str | None) -> str:
  if file is None:
    return ''
  try:
    key = pathlib.Path(file).expanduser().read_text(encoding='utf-8').strip()
  except (OSError, ValueError) as e:
    raise UsageError(f'--api_key_file={file} cannot be read: {e}') from None
  if not key:
    raise UsageError(f'--api_key_file={file} is empty')
  return key


def main(argv: Sequence[str] | None = None) -> int:
  """Returns the exit status: 0 ended on request, 2 wrong usage."""
  argv = list(sys.argv if argv is None else argv)
  if any(a in ('-h', '--help', '-help', '--helpfull') for a in argv[1:]):
    print(f'{__doc__}\n{USAGE}\n{_define().module_help(sys.modules[__name__])}')
    return 0
  try:
    values = parse(argv)
    folder = pathlib.Path(values.checkpoint).expanduser().absolute()
    kind_of(folder)  # Importing jax takes seconds; typing mistakes should not have to wait for it.
    key = _key(values.api_key_file)
    _serve(values, folder, key)
  except UsageError as e:
    print(f'error: {e}', file=sys.stderr)
    return 2
  return 0


def _serve(values: flags.FlagValues, folder: pathlib.Path, key: str) -> None:
  from glm5_jax.convert import CheckpointError as HfError
  from glm5_jax.data import DataError
  from glm5_jax.data.chat import ChatFormat
  from glm5_jax.infer import server
  from glm5_jax.infer.engine import Engine
  from glm5_jax.infer.programs import EngineConfig, make_mesh
  from glm5_jax.infer.server_gate import local_names
  from glm5_jax.train.checkpoint import CheckpointError

  hosts = local_names(values.host)
  config = server.ServerConfig(
    values.name or folder.name,
    form=ChatFormat(values.chat_format),
    api_key=key,
    hosts=hosts,
    body_bytes=values.max_body_mb << 20,
    new_tokens=values.max_new_tokens,
    sequences=values.max_requests,
    request_seconds=values.timeout,
    drain_seconds=values.drain_seconds,
  )
  try:
    sock = server.listen(values.host, values.port)
  except OSError as e:
    raise UsageError(f'cannot listen on {values.host}:{values.port}: {e.strerror or e}') from None
  if not hosts and not key:
    print(
      f'warning: {values.host} lets other machines in, and there is no --api_key_file',
      file=sys.stderr,
    )
  with sock:
    try:
      params, model, tokenizer, version = load(folder, make_mesh(values.tensor))
      engine = Engine(
        params,
        model,
        tokenizer,
        EngineConfig(
          pages=values.pages,
          max_length=values.max_length,
          max_sequences=values.max_sequences,
          draft_steps=values.draft_steps,
          kernels=values.kernels,
          tensor=values.tensor,
        ),
        version=version,
        keep=True,
      )
      del params
    except (CheckpointError, HfError, DataError, ValueError) as e:
      raise UsageError(' '.join(str(e).split())) from None
    print(f'{folder}: weights of version {version}; compiling', flush=True)
    engine.warm_up()
    host, port = sock.getsockname()[:2]
    shown = f'[{host}]' if ':' in host else host
    print(f'serving {config.name} at http://{shown}:{port}/ (OpenAI: /v1)', flush=True)
    server.serve(engine, tokenizer, config, sock)
  print('ended', flush=True)


if __name__ == '__main__':
  sys.exit(main())
