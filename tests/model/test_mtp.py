"""Multi-token prediction against the golden of its first step and the oracle of all three."""

import types

import numpy as np
import pytest

from glm5_jax.modules import model, mtp
from glm5_jax.modules.block import Options
from tests import oracle, tiny

STEPS = 3


@pytest.fixture(scope='module')
def run(with_mtp):
  return tiny.forward(
    with_mtp.params, with_mtp.ids, with_mtp.config, options=Options(capture=True), mtp_steps=STEPS
  )


@pytest.fixture(scope='module')
def expected(with_mtp):
  return oracle.forward(with_mtp.tensors, with_mtp.raw, with_mtp.ids, mtp_steps=STEPS)


def test_first_step(with_mtp, run):
  """Position t uses token t + 1 and predicts token t + 2; the last position has no token to use."""
  reference = with_mtp.reference
  layer = {name: a[0] for name, a in run.aux['mtp'].items()}
  tiny.close('main hidden state', run.hidden, reference['main_last_hidden'], 1e-5)
  tiny.close('MTP input', layer['mtp_in'][:, :-1], reference['mtp_in'], 1e-5)
  tiny.close('MTP block', layer['block_out'][:, :-1], reference['mtp_block_out'], 1e-5)
  tiny.close('MTP hidden state', run.mtp_hidden[0][:, :-1], reference['mtp_normed'], 1e-5)
  tiny.close('MTP logits', run.mtp_logits[0][:, :-1], reference['mtp_logits'], 1e-5)
  loss = oracle.cross_entropy(
    np.asarray(run.mtp_logits[0], np.float64)[:, :-2], with_mtp.ids[:, 2:]
  )
  tiny.close('MTP loss', loss, reference['mtp_loss'], 2e-6)


@pytest.mark.parametrize('step', range(STEPS))
def test_all_steps(run, expected, step):
  """Steps share the layer and each selects anew; the hidden state passed on is the normalised one."""
  t = run.mtp_logits[step].shape[1] - step - 1
  tiny.close(
    f'MTP logits of step {step + 1}',
    run.mtp_logits[step][:, :t],
    expected['mtp_logits'][step],
    1e-5,
  )
  aux, want = run.aux['mtp'], expected['mtp_layers'][step]
  np.testing.assert_array_equal(aux['selected'][step][:, :t, :t], want['selected'])
  experts = np.asarray(aux['router_experts'][step]).reshape(2, 48, -1)[:, :t]
  np.testing.assert_array_equal(experts, want['experts'].reshape(2, t, -1))


def test_the_main_model_is_unaffected(plain, run):
  tiny.close('logits with MTP steps', run.logits, plain.reference['logits'], 1e-5)


@pytest.mark.parametrize('layers', [2, 0])
def test_steps_must_fill_the_layers(layers):
  scan = types.SimpleNamespace(config=tiny.config(num_nextn_predict_layers=layers))
  with pytest.raises(ValueError, match=f'3 MTP steps cannot be made of {layers} layers'):
    mtp.predict(scan, np.zeros((1, 4, 40)), np.zeros((1, 4, 40)), None, steps=3)


def test_no_steps_with_a_cache(with_mtp):
  cache = model.init_cache(with_mtp.config, 2, 8)
  with pytest.raises(ValueError, match='MTP steps keep no cache'):
    model.forward(
      with_mtp.params, with_mtp.ids[:, :4], config=with_mtp.config, cache=cache, mtp_steps=1
    )
