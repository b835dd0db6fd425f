"""One device or eight, one process or two: the same tokens, the same losses, the same new weights."""

from __future__ import annotations

import json
import os
import pathlib
import socket
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from ragen_jax.distributed.mesh import make_mesh
from ragen_jax.distributed.sharding import weight_spec
from ragen_jax.utils.errors import UserError

ROOT = pathlib.Path(__file__).parents[1]


def _environment(devices):
  return os.environ | {
    'XLA_FLAGS': f'--xla_force_host_platform_device_count={devices}',
    'JAX_PLATFORMS': 'cpu',
    'PYTHONPATH': str(ROOT),
  }


def _free_port():
  with socket.socket() as s:
    s.bind(('127.0.0.1', 0))
    return s.getsockname()[1]


def _wait(workers, seconds=240):
  """Their exit statuses; when one fails the others are killed, which may wait for it."""
  end = time.monotonic() + seconds
  while time.monotonic() < end and any(w.poll() is None for w in workers) and not any(w.poll() for w in workers):
    time.sleep(0.1)
  for w in workers:
    w.kill()
  return [w.wait() for w in workers]


def _run(tmp_path, data, fsdp, tensor, processes=1, **fields):
  out = tmp_path / f'{data}{fsdp}{tensor}-{processes}.npz'
  command = [sys.executable, '-m', 'tests.mesh_worker', str(data), str(fsdp), str(tensor), str(out)]
  extra = [[]]
  if processes > 1:
    address = f'127.0.0.1:{_free_port()}'
    extra = [[address, str(processes), str(i)] for i in range(processes)]
  logs = [tmp_path / f'{out.name}-{i}.log' for i in range(processes)]
  workers = []
  for arguments, log in zip(extra, logs, strict=True):
    with log.open('w') as file:
      environment = _environment(data * fsdp * tensor // processes) | {'CONFIG_FIELDS': json.dumps(fields)}
      workers.append(subprocess.Popen([*command, *arguments], cwd=ROOT, env=environment, stdout=file, stderr=file))
  codes = _wait(workers)
  assert codes == [0] * processes, '\n'.join(log.read_text()[-3000:] for log in logs)
  return np.load(out)


@pytest.fixture(scope='module')
def one_device(tmp_path_factory):
  return _run(tmp_path_factory.mktemp('one'), 1, 1, 1)


@pytest.mark.parametrize(
  ('shape', 'processes'),
  [
    ((8, 1, 1), 1),
    ((2, 2, 2), 1),
    ((1, 2, 1), 2),  # each process plays half of the rows and holds half of the weights
    ((1, 1, 2), 2),  # both play the same rows, with half of the heads each
  ],
)
def test_a_mesh_changes_nothing(tmp_path, one_device, shape, processes):
  many = _run(tmp_path, *shape, processes)
  _same(many, one_device, shape)


@pytest.mark.slow
def test_a_mesh_changes_nothing_with_a_separate_critic(tmp_path):
  one = _run(tmp_path, 1, 1, 1, model__separate_critic=True)
  _same(_run(tmp_path, 2, 2, 2, model__separate_critic=True), one, (2, 2, 2))


def _same(many, one_device, shape):
  assert int(many['shards']) == shape[1] * shape[2]  # the weights really are divided
  np.testing.assert_array_equal(many['tokens'], one_device['tokens'])
  np.testing.assert_allclose(many['logprobs'], one_device['logprobs'], atol=1e-4)
  np.testing.assert_allclose(many['advantages'], one_device['advantages'], atol=1e-3)
  ours, theirs = json.loads(str(many['metrics'])), json.loads(str(one_device['metrics']))
  for name in ('actor/pg_loss', 'actor/entropy', 'critic/vf_loss', 'actor/grad_norm', 'critic/advantages/max'):
    np.testing.assert_allclose(ours[name], theirs[name], rtol=1e-3, atol=1e-4, err_msg=name)
  for name in one_device.files:
    if name.startswith('w'):
      # Two Adam steps of 1e-3 each: a gradient that is only rounding may fall to either side.
      difference = np.abs(many[name] - one_device[name])
      assert np.quantile(difference, 0.99) < 1e-4 and difference.max() < 4.5e-3


def test_a_dimension_that_does_not_divide_is_named():
  mesh = jax.sharding.AbstractMesh((1, 1, 4), ('data', 'fsdp', 'tensor'))
  with pytest.raises(UserError, match=r'mesh\.tensor=4: does not divide the 2 of .*k_proj.*1, 2 would') as e:
    weight_spec('policy/layers/0/self_attn/k_proj/kernel', (64, 2, 16), mesh)
  assert '\n' not in str(e.value)
  assert weight_spec('policy/layers/0/self_attn/q_proj/kernel', (64, 4, 16), mesh) == jax.sharding.PartitionSpec(
    'fsdp', 'tensor', None
  )


def test_axes_must_multiply_to_the_devices():
  with pytest.raises(UserError, match=r'mesh\.fsdp=2.*number of devices, 1'):
    make_mesh(1, 2, 1)
  assert dict(make_mesh(-1, 1, 1).shape) == {'data': 1, 'fsdp': 1, 'tensor': 1}
