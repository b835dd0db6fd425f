"""One device or eight, one process or two: the same tokens, the same losses, the same new weights."""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from ragen_jax.models import presets
from ragen_jax.models.checkpoint.config import read_config
from ragen_jax.models.checkpoint.load import load_params, load_value_head
from ragen_jax.models.checkpoint.save import save_model
from ragen_jax.models.value_head import ValueHead
from ragen_jax.runs.checkpoints import Checkpointer
from tests.support import mesh_worker
from tests.support.checkpoints import random_params
from tests.support.models import EXPERTS, HYBRID, WINDOWS, random_model
from tests.support.paths import ROOT
from tests.support.processes import coordinator, copy_python, environment


def _wait(workers, seconds=580):
  """Their exit statuses; when one fails the others are killed, which may wait for it."""
  end = time.monotonic() + seconds
  while time.monotonic() < end and any(w.poll() is None for w in workers) and not any(w.poll() for w in workers):
    time.sleep(0.1)
  for w in workers:
    w.kill()
  return [w.wait() for w in workers]


def _run(model, directory, shapes, processes=1, checkpoint='', **fields):
  """Runs the worker over some shapes; what it found, by shape."""
  directory.mkdir()
  given = [model, str(directory), checkpoint, ','.join(shapes)]
  devices, fields = math.prod(map(int, shapes[0].split('x'))) // processes, json.dumps(fields)
  if processes == 1:
    code = 'from tests.support import mesh_worker; mesh_worker.main()'
    copy_python(code, *given, devices=devices, check=True, timeout=580, CONFIG_FIELDS=fields)
    return {shape: np.load(directory / f'{shape}.npz') for shape in shapes}
  command, workers = [sys.executable, '-m', 'tests.support.mesh_worker', *given], []
  logs = [directory / f'{i}.log' for i in range(processes)]
  with coordinator() as address:
    for i, log in enumerate(logs):
      own, variables = [address, str(processes), str(i)], environment(devices, CONFIG_FIELDS=fields)
      with log.open('w') as file:
        workers.append(subprocess.Popen([*command, *own], cwd=ROOT, env=variables, stdout=file, stderr=file))
    codes = _wait(workers)
  assert codes == [0] * processes, '\n'.join(log.read_text()[-3000:] for log in logs)
  return {shape: np.load(directory / f'{shape}.npz') for shape in shapes}


@pytest.fixture(scope='module')
def model(tmp_path_factory):
  """The built-in model's first layer, which is less to compile, with each key/value head twice, to divide by 4."""
  source = presets.resolve('tiny', '')
  cfg = read_config(source)
  leaves = nnx.to_flat_state(load_params(source, cfg, 'float32'))
  doubled = [
    (path, leaf.replace(jnp.repeat(leaf[...], 2, axis=-2)) if {'k_proj', 'v_proj'} & set(path) else leaf)
    for path, leaf in leaves
    if path[:2] != ('layers', 1)
  ]
  head = ValueHead(cfg.hidden_size)
  assert load_value_head(source, head)
  directory = str(tmp_path_factory.mktemp('model') / 'doubled')
  cfg = dataclasses.replace(cfg, num_layers=1, num_kv_heads=2 * cfg.num_kv_heads)
  save_model(directory, nnx.from_flat_state(doubled), cfg, 'float32', tokenizer_dir=source, value_head=head)
  return directory


@pytest.fixture(scope='module')
def workdir(tmp_path_factory):
  """With the state of one device."""
  return str(tmp_path_factory.mktemp('one'))


@pytest.fixture(scope='module')
def one_device(model, workdir):
  return mesh_worker.play_and_update(model, '1x1x1', workdir)


def _assert_same(many, one):
  assert many['moved'] == 0  # or the next iteration would compile all its programs again
  assert many['bad_step'].all()  # skipped, weights as before to the last bit, in the program of the other steps
  np.testing.assert_array_equal(many['tokens'], one['tokens'])
  np.testing.assert_allclose(many['logprobs'], one['logprobs'], atol=1e-4)
  np.testing.assert_allclose(many['advantages'], one['advantages'], atol=1e-3)
  ours, theirs = json.loads(str(many['metrics'])), json.loads(str(one['metrics']))
  for name in ('actor/pg_loss', 'actor/entropy', 'critic/vf_loss', 'actor/grad_norm', 'critic/advantages/max'):
    np.testing.assert_allclose(ours[name], theirs[name], rtol=1e-3, atol=1e-4, err_msg=name)
  for name in one:
    if name.startswith('w'):
      # Two Adam steps of 1e-3 each: a gradient that is only rounding may fall to either side.
      difference = np.abs(many[name] - one[name])
      assert np.quantile(difference, 0.99) < 1e-4 and difference.max() < 4.5e-3


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
  ('shape', 'fields'),
  [
    (HYBRID | {'num_layers': 2, 'layer_kinds': HYBRID['layer_kinds'][2:]}, {}),
    (EXPERTS, {}),
    (WINDOWS, {}),
    # Neighbours divide the experts while they sample, and the update uses what they recorded.
    (EXPERTS, {'agent__decode_shards': 2, 'algorithm__replay_experts': True}),
  ],
  ids=['memories', 'experts', 'windows', 'experts of neighbours'],
)
@pytest.mark.exhaustive_cases('memories', 'experts', 'windows', 'experts of neighbours')
def test_eight_devices_change_nothing_for_other_kinds_of_layers(tmp_path, monkeypatch, shape, fields):
  source = presets.resolve('tiny', '')
  tiny = read_config(source)
  cfg = random_model(tiny.vocab_size, **shape).policy.cfg
  directory, params = str(tmp_path / 'model'), random_params(cfg)
  params = jax.tree.map(lambda x: 0.3 * x, params)
  save_model(directory, params, cfg, 'float32', tokenizer_dir=source)
  of_one = {name: value for name, value in fields.items() if name != 'agent__decode_shards'}
  monkeypatch.setenv('CONFIG_FIELDS', json.dumps(of_one))
  one = mesh_worker.play_and_update(directory, '1x1x1', str(tmp_path / 'one'))
  for result in _run(directory, tmp_path / 'eight', ['2x2x2', '4x1x2'], **fields).values():
    _assert_same(result, one)


@pytest.mark.slow
@pytest.mark.timeout(600)  # it is compilation, and machines are busy
@pytest.mark.parametrize('shards', [{'2x2x2': 8}, {'8x1x1': 8, '1x8x1': 8, '1x2x4': 8}])
@pytest.mark.exhaustive_cases('shards1')
def test_eight_devices_change_nothing_however_they_are_arranged(tmp_path, model, one_device, workdir, shards):
  found = _run(model, tmp_path / 'eight', [*shards], checkpoint=workdir)
  # In how many parts the embedding lies, as it comes from the file.
  assert {shape: int(found[shape]['shards']) for shape in found} == shards
  for shape, result in found.items():
    _assert_same(result, one_device)
    assert result['moment_shards'] == 8  # each device has its part of the optimiser's state
    _assert_restored(result, one_device)
    # And back on one device, to the last bit.
    like = mesh_worker.saved_like(model)
    with Checkpointer(str(tmp_path / 'eight' / f'state-{shape}'), keep=1) as checkpointer:
      arrays = jax.tree.leaves(checkpointer.restore(like)[0])
    _assert_restored({f'restored{i}': np.asarray(x) for i, x in enumerate(arrays)}, result)


def _assert_restored(found, saved):
  """What was read is what was saved on another mesh."""
  names = [name for name in saved if name.startswith('saved')]
  assert len(names) > 10
  for name in names:
    np.testing.assert_array_equal(found[name.replace('saved', 'restored')], saved[name])


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
def test_two_processes_change_nothing(tmp_path, model, one_device):
  # First each plays half of the rows and holds half of the weights, in two ways; then both play the same rows, with
  # half of the heads each.
  found = _run(model, tmp_path / 'two', ['1x2x1', '2x1x1', '1x1x2'], processes=2)
  assert [int(found[shape]['shards']) for shape in found] == [2, 2, 2]
  for result in found.values():
    _assert_same(result, one_device)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.exhaustive
def test_eight_devices_change_nothing_with_a_separate_critic(tmp_path, model):
  one = _run(model, tmp_path / 'one', ['1x1x1'], model__separate_critic=True)['1x1x1']
  _assert_same(_run(model, tmp_path / 'eight', ['2x2x2'], model__separate_critic=True)['2x2x2'], one)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(('shards', 'shapes'), [(2, ['8x1x1']), (4, ['2x2x2', '1x8x1'])])
@pytest.mark.exhaustive_cases('4-shapes1')
def test_devices_that_divide_the_mlp_among_them_sample_the_same_tokens(tmp_path, model, one_device, shards, shapes):
  for result in _run(model, tmp_path / 'eight', shapes, agent__decode_shards=shards).values():
    _assert_same(result, one_device)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.exhaustive
def test_devices_that_divide_the_mlp_among_them_serve_the_same_replies():
  command = [sys.executable, '-m', 'tests.support.rows_worker']
  done = subprocess.run(command, cwd=ROOT, env=environment(8), capture_output=True, text=True, timeout=580)
  assert done.returncode == 0, done.stderr[-3000:]
