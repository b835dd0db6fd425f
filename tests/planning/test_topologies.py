"""Chips by name: what is refused, what is asked to be installed, and what the compilers are told."""

from __future__ import annotations

import os

import jax
import pytest

from ragen_jax.planning import topologies
from ragen_jax.utils.errors import UserError


@pytest.mark.parametrize('name', ['v5e', 'v5e:', 'v5e:3x3', 'v5p:2x4', 'h100:16', 'h100:2x4', 'a100:8', ''])
def test_an_unknown_topology_is_refused_with_those_allowed(name):
  with pytest.raises(UserError, match=r'allowed: v5e:1x1.*h100:1') as e:
    topologies.parse(name, 'plan.topology')
  assert str(e.value).startswith(f'plan.topology={name!r}: ') and '\n' not in str(e.value)


@pytest.mark.parametrize(('name', 'size'), [('v5e:2x4', 8), ('v5p:2x2x4', 16), ('v5e:16x16', 256), ('h100:8', 8)])
def test_a_topology_has_as_many_chips_as_its_shape(name, size):
  assert topologies.parse(name).size == size


def test_every_name_of_the_list_can_be_given():
  for kind, chip in topologies.CHIPS.items():
    for shape in chip.shapes:
      assert topologies.parse(f'{kind}:{shape}').chip is chip


@pytest.mark.parametrize(('platform', 'words'), [('tpu', 'requirements-aot.txt'), ('cuda', 'jax-cuda12-plugin==')])
def test_a_compiler_that_is_not_installed_is_named(monkeypatch, platform, words):
  monkeypatch.setattr(topologies.importlib.util, 'find_spec', lambda name: None)
  line = topologies.missing(platform)
  assert words in line and '\n' not in line
  name = {'tpu': 'v5e:2x4', 'cuda': 'h100:8'}[platform]
  with pytest.raises(UserError, match='is not installed'):
    topologies.prepare(topologies.parse(name))


def test_the_compiler_of_gpus_is_looked_for_in_both_of_nvidias_layouts(monkeypatch, tmp_path):
  for folder in ('cuda_nvcc', 'cu13'):
    place = tmp_path / folder
    ptxas = place / folder / 'bin' / 'ptxas'
    ptxas.parent.mkdir(parents=True)
    ptxas.touch()
    spec = type('Spec', (), {'submodule_search_locations': [str(place)]})
    monkeypatch.setattr(topologies.importlib.util, 'find_spec', lambda name, spec=spec: spec)
    assert topologies.missing('cuda') == ''
    assert topologies._cuda_tools() == place / folder


def test_what_compilers_read_is_set_before_they_start(monkeypatch):
  monkeypatch.setattr(topologies, 'missing', lambda platform: '')
  monkeypatch.setattr(topologies, '_cuda_tools', lambda: topologies.pathlib.Path('/tools'))
  for name in ('TPU_ACCELERATOR_TYPE', 'ALLOW_MULTIPLE_LIBTPU_LOAD'):
    monkeypatch.delenv(name, raising=False)
  for name in ('TF_CPP_MIN_LOG_LEVEL', 'TPU_SKIP_MDS_QUERY', 'TPU_WORKER_HOSTNAMES', 'TPU_STDERR_LOG_LEVEL',
               'TPU_MIN_LOG_LEVEL'):  # fmt: skip
    monkeypatch.setenv(name, 'kept')
  monkeypatch.setenv('XLA_FLAGS', '--theirs')
  monkeypatch.setenv('PATH', '/theirs')
  cached, platforms = jax.config.jax_enable_compilation_cache, jax.config.jax_platforms
  try:
    topologies.prepare(topologies.parse('v5e:2x4'))
    assert not jax.config.jax_enable_compilation_cache and jax.config.jax_platforms == 'cpu'
    assert (os.environ['TPU_ACCELERATOR_TYPE'], os.environ['ALLOW_MULTIPLE_LIBTPU_LOAD']) == ('none', '1')
    assert os.environ['TPU_WORKER_HOSTNAMES'] == 'kept'
    topologies.prepare(topologies.parse('h100:8'))
    flags = os.environ['XLA_FLAGS'].split()
    assert flags == ['--theirs', '--xla_gpu_cuda_data_dir=/tools', '--xla_gpu_autotune_level=0']
    assert os.environ['PATH'].split(os.pathsep) == ['/tools/bin', '/theirs']
  finally:
    jax.config.update('jax_enable_compilation_cache', cached)
    jax.config.update('jax_platforms', platforms)
    for name in ('TPU_ACCELERATOR_TYPE', 'ALLOW_MULTIPLE_LIBTPU_LOAD'):
      os.environ.pop(name, None)


def test_a_gpu_is_described_with_its_own_memory():
  text = topologies._gpu_target(topologies.CHIPS['h200'])
  assert 'memory_bandwidth: 4800000000000\n' in text and 'device_memory_size: 141000000000\n' in text
  assert 'cuda_compute_capability { major: 9 }' in text


def test_hosts_of_small_flat_machines_have_all_chips():
  bounds = {name: topologies._host_bounds(topologies.parse(name)) for name in ('v5e:2x4', 'v5e:16x16', 'v5p:2x2x2')}
  assert bounds == {'v5e:2x4': [2, 4, 1], 'v5e:16x16': [2, 2, 1], 'v5p:2x2x2': [2, 2, 1]}


def test_what_libraries_write_is_held_back(capfd):
  with topologies.quiet():
    os.write(2, b'noise\n')
  os.write(2, b'after\n')
  assert capfd.readouterr().err == 'after\n'
