"""The command that serves: which folders it takes, what it says of others, the whole program."""

import contextlib
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import openai
import pytest

from configs import nano_pretrain
from experiments import serve
from glm5_jax.convert import save_hf
from glm5_jax.data.tokenizer import ByteTokenizer
from glm5_jax.train.checkpoint import Checkpoints
from glm5_jax.train.prepare import build_model_config, plain
from tests import tiny

ROOT = pathlib.Path(__file__).resolve().parents[2]


def hf_folder(folder: pathlib.Path, **changes) -> pathlib.Path:
  """A tiny model in a Hugging Face folder."""
  config = tiny.config(
    first_k_dense_replace=0, vocab_size=292, max_position_embeddings=64, eos_token_id=(256,)
  )
  config = config.replace(**changes)
  save_hf(folder, config, tiny.random_params(config, std=0.05))
  ByteTokenizer().save(folder)
  return folder


@pytest.fixture(scope='module')
def hf(tmp_path_factory) -> pathlib.Path:
  return hf_folder(tmp_path_factory.mktemp('hf'))


@flax.struct.dataclass
class _State:
  params: Any
  step: Any


@pytest.fixture(scope='module')
def run_folder(tmp_path_factory) -> pathlib.Path:
  """The parts of a run's folder that are served."""
  folder = tmp_path_factory.mktemp('run')
  config = nano_pretrain.get_config()
  changes = {
    'hidden_size': 40, 'num_hidden_layers': 1, 'first_k_dense_replace': 0, 'vocab_size': 292,
    'moe_intermediate_size': 28, 'max_position_embeddings': 64,
  }  # fmt: skip
  for name, value in changes.items():
    config.model[name] = value
  (folder / 'config.json').write_text(json.dumps(plain(config)))
  ByteTokenizer().save(folder)
  checkpoints = Checkpoints(folder / 'checkpoints')
  params = tiny.random_params(build_model_config(config.model), std=0.05)
  for step in (1, 2):
    checkpoints.save(step, _State(params, jnp.int32(step)))
  checkpoints.close()
  return folder


def error(capsys, *args: str) -> str:
  assert serve.main(['serve', *args]) == 2
  out, err = capsys.readouterr()
  assert err.startswith('error: ') and err.count('\n') == 1 and 'Traceback' not in err + out
  return err


def test_usage(capsys, tmp_path, hf):
  folder = f'--checkpoint={hf}'
  assert '--checkpoint is missing' in error(capsys)
  assert 'Did you mean: checkpoint' in error(capsys, '--chekpoint=x')
  assert 'unexpected argument' in error(capsys, folder, 'now')
  assert 'is not a folder' in error(capsys, f'--checkpoint={tmp_path}/none')
  assert 'neither the folder of a run' in error(capsys, f'--checkpoint={tmp_path}')
  assert 'port' in error(capsys, folder, '--port=99999')
  assert 'chat_format' in error(capsys, folder, '--chat_format=4')
  assert 'cannot be read' in error(capsys, folder, f'--api_key_file={tmp_path}/key')
  (tmp_path / 'key').write_text('\n')
  assert 'is empty' in error(capsys, folder, f'--api_key_file={tmp_path}/key')
  assert 'cannot listen on 192.0.2.1:0' in error(capsys, folder, '--host=192.0.2.1', '--port=0')


def test_sizes_that_do_not_fit(capsys, hf):
  assert 'max_length=999 must be within 2..64' in error(
    capsys, f'--checkpoint={hf}', '--port=0', '--max_length=999'
  )
  assert 'is for 1024 devices; there are' in error(
    capsys, f'--checkpoint={hf}', '--port=0', '--tensor=1024'
  )


def test_folders_that_look_alike(capsys, tmp_path, hf):
  """A pipeline's folder, a model without its tokenizer, damaged weights."""
  (tmp_path / '1_pretrain' / 'checkpoints').mkdir(parents=True)
  (tmp_path / '2_sft' / 'checkpoints').mkdir(parents=True)
  (tmp_path / 'config.json').write_text(json.dumps({'order': ['pretrain', 'sft'], 'stages': {}}))
  assert f'name one stage, such as {tmp_path}/2_sft' in error(capsys, f'--checkpoint={tmp_path}')
  bare = tmp_path / 'bare'
  shutil.copytree(hf, bare)
  (bare / 'tokenizer.json').unlink()
  assert 'has no tokenizer.json' in error(capsys, f'--checkpoint={bare}')
  ByteTokenizer().save(bare)
  for file in bare.glob('*.safetensors'):
    file.write_bytes(file.read_bytes()[:500])
  assert str(bare) in error(capsys, f'--checkpoint={bare}', '--port=0')


def test_a_tokenizer_of_another_model(capsys, tmp_path):
  hf_folder(tmp_path, vocab_size=100, eos_token_id=(9,))
  message = error(capsys, f'--checkpoint={tmp_path}', '--port=0')
  assert 'the tokenizer has 292 tokens' in message


def test_loads_both_kinds(hf, run_folder):
  """The parameters of the folder, its tokenizer, and an end that the tokenizer has too."""
  params, model, tokenizer, version = serve.load(hf)
  want = tiny.random_params(model, std=0.05)
  assert version == 0 and tokenizer.vocab_size == 292
  jax.tree.map(np.testing.assert_array_equal, params, want)
  params, model, tokenizer, version = serve.load(run_folder)
  want = tiny.random_params(model, std=0.05)
  assert version == 2 and model.hidden_size == 40
  assert tokenizer.eot_id in model.eos_token_id
  jax.tree.map(np.testing.assert_array_equal, params, want)


@pytest.mark.parametrize('kind, devices', [('run_folder', 1), ('run_folder', 2), ('hf', 2)])
def test_the_program(kind, devices, request):
  """As typed: it serves, on one device or two, and ends with status 0."""
  command = [
    sys.executable, '-m', 'experiments.serve', f'--checkpoint={request.getfixturevalue(kind)}',
    '--port=0', '--max_length=32', '--max_sequences=1', '--pages=3', '--name=fox',
    f'--tensor={devices}',
  ]  # fmt: skip
  process = subprocess.Popen(
    command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    env=os.environ | {'XLA_FLAGS': f'--xla_force_host_platform_device_count={devices}'},
  )  # fmt: skip
  with contextlib.ExitStack() as stack:
    stack.callback(process.kill)
    line = next(line for line in process.stdout if line.startswith('serving fox at '))
    url = line.split()[3]
    with openai.OpenAI(base_url=f'{url}v1', api_key='none') as client:
      answer = client.completions.create(model='fox', prompt='the', max_tokens=5)
    assert answer.usage.completion_tokens >= 1
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0 and out.endswith('ended\n') and 'Traceback' not in err
