"""benchmarks/accelerator.py: its jobs and their budget, what becomes of failures, and all parts on a CPU."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from benchmarks import accelerator, accelerator_decode, accelerator_numbers, accelerator_work
from ragen_jax.models import attention
from ragen_jax.models.qwen import Qwen
from tests.support.paths import ROOT
from tests.support.processes import copy_python


def test_combinations_of_flags_begin_with_the_fewest_changes():
  found = accelerator_decode.flag_sets()
  assert found[0] == accelerator_decode.FlagSet('default', ())
  assert len({x.name for x in found}) == len({x.flags for x in found}) == 3 * 2 * 2
  assert [len(x.flags) for x in found] == [0] + 4 * [1] + 5 * [2] + 2 * [3]
  assert found[-1].name == 'command buffers +WHILE, latency-hiding scheduler on, triton GEMM off'


@pytest.mark.slow
def test_xla_knows_the_flags():
  """It ends the process if it does not."""
  flags = {flag for x in accelerator_decode.flag_sets() for flag in x.flags}
  found = os.environ | {'XLA_FLAGS': ' '.join(sorted(flags)), 'JAX_PLATFORMS': 'cpu'}
  subprocess.run([sys.executable, '-c', 'import jax; jax.devices()'], env=found, check=True, timeout=120)


def test_jobs_of_a_part_and_of_all():
  jobs = accelerator.jobs(accelerator.PARTS, quick=False)
  assert len({x.title for x in jobs}) == len(jobs)
  assert [x.title for x in jobs[:6]] == [
    'parity', 'attention', 'decode, default', 'iteration, run', 'main_job', 'decode, transformers'
  ]  # fmt: skip
  # What needs no device comes next, then the effect of each flag, and combinations of several flags last.
  flags = [len(x.flags) for x in jobs]
  assert flags == sorted(flags) and all(x.on_cpu for x in jobs[6:8])
  of_decode = accelerator.jobs(('decode',), quick=False)
  assert {x.part for x in of_decode} == {'decode'} and len(of_decode) == 13
  assert [x.may_fail for x in of_decode] == [False] + 12 * [True]
  assert sum(x.worker == 'decode' for x in accelerator.jobs(accelerator.PARTS, quick=True)) == 2


def test_the_environment_of_a_job():
  job = accelerator.Job('decode', 'x', 'decode', 0, 1, flags=('--b=1', '--c=2'))
  assert accelerator.environment(job, {'XLA_FLAGS': '--a=0'})['XLA_FLAGS'] == '--a=0 --b=1 --c=2'
  assert 'JAX_PLATFORMS' not in accelerator.environment(job, {})
  assert accelerator.environment(job, {})['XLA_PYTHON_CLIENT_PREALLOCATE'] == 'false'
  assert accelerator.environment(job, {'JAX_PLATFORMS': 'cuda'})['JAX_PLATFORMS'] == 'cuda,cpu'
  assert accelerator.environment(job, {'JAX_PLATFORMS': 'cpu'})['JAX_PLATFORMS'] == 'cpu'
  planning = dataclasses.replace(job, on_cpu=True)
  assert accelerator.environment(planning, {'JAX_PLATFORMS': 'cuda'})['JAX_PLATFORMS'] == 'cpu'


class _Machine:
  """Jobs that take given seconds and return given results, and its clock."""

  def __init__(self, results: dict[str, tuple[float, dict]]):
    self.now, self.results, self.limits = 100.0, results, {}

  def execute(self, job, settings, limit):
    seconds, found = self.results[job.title]
    self.limits[job.title] = limit
    self.now += min(seconds, limit)
    return found

  def run(self, jobs, seconds):
    record, written = {}, []
    failures = accelerator.run_all(
      jobs, record, {}, seconds, lambda: written.append(json.dumps(record)), self.execute, lambda: self.now
    )
    return record, written, failures


def _job(part, name='', least=10, limit=50, **fields):
  return accelerator.Job(part, name, 'decode', least, limit, **fields)


def test_results_are_written_after_each_job_and_what_does_not_fit_is_left_out_with_the_reason():
  machine = _Machine({'parity': (30, {'a': 1}), 'decode, x': (60, {'b': 2}), 'main_job': (5, {'c': 3})})
  record, written, failures = machine.run(
    [_job('parity'), _job('decode', 'x'), _job('attention'), _job('main_job', least=5)], 85
  )
  assert machine.limits == {'parity': 50, 'decode, x': 50, 'main_job': 5}
  assert record == {
    'parity': {'a': 1},
    'decode': {'x': {'b': 2}},
    'attention': {'left_out': 'needs 10 s of the budget, and 5 s are left'},
    'main_job': {'c': 3},
  }
  assert [list(json.loads(x)) for x in written] == [list(record)[:n] for n in (1, 2, 3, 4)]
  assert failures == []


def test_what_the_budget_cuts_is_no_failure_and_what_its_own_limit_ends_is_one():
  ended = {'first': 1, 'error': 'ended after 9 s: x'}
  machine = _Machine({'parity': (50, dict(ended)), 'main_job': (50, dict(ended))})
  record, _, failures = machine.run([_job('parity'), _job('main_job')], 60)
  assert failures == ['parity: ended after 9 s: x'] and record['parity'] == ended
  assert record['main_job'] == {'first': 1, 'left_out': 'the rest, as the budget ended after 9 s: x'}


def test_a_combination_that_fails_is_a_result_and_a_part_that_fails_is_a_failure():
  machine = _Machine({
    'decode, x': (1, {'error': 'no such flag'}),
    'parity': (1, {'over_limits': ['logits', 'gradient']}),
    'attention': (1, {'einsum': {'packed': {'error': 'out of memory'}}, 'cudnn': {'whole': {'error': 'E'}}}),
    'decode, default': (1, {'einsum': {'error': 'E: no'}}),
    'iteration, run': (1, {'timed': {'finite': False}}),
    'main_job': (1, {'cudnn': {'error': 'of a kernel'}, 'timed': {'finite': True}}),
  })  # fmt: skip
  jobs = [_job('decode', 'x', may_fail=True), _job('parity'), _job('attention'), _job('decode', 'default')]
  record, written, failures = machine.run([*jobs, _job('iteration', 'run'), _job('main_job')], 1000)
  assert record['decode']['x'] == {'error': 'no such flag'} and len(written) == 6
  assert failures == [
    'parity: differences above the limits: logits, gradient',
    'attention: einsum: out of memory',
    'decode, default: einsum: E: no',
    'iteration, run: numbers of the iteration are not finite',
  ]


@pytest.mark.slow
def test_a_process_that_xla_ends_leaves_its_message():
  job = accelerator.Job('decode', 'x', 'setup', 0, 60, flags=('--xla_no_such_flag=1',))
  found = accelerator.run(job, {'quick': True, 'checkpoint': '/nowhere', 'seed': 0}, 60)
  assert 'Unknown flag' in found['error'] and 'xla_no_such_flag' in found['error'] and '\n' not in found['error']
  assert found['xla_flags'] == ['--xla_no_such_flag=1'] and found['job_s'] > 0


@pytest.mark.slow
def test_a_job_that_raises_leaves_its_error():
  job = accelerator.Job('attention', '', 'attention', 0, 60)
  found = accelerator.run(job, {'quick': True, 'checkpoint': '/nowhere', 'seed': 0}, 60)
  assert found['error'].startswith('UserError: ') and '/nowhere' in found['error']


@pytest.mark.slow
def test_a_job_that_takes_too_long_is_ended_with_what_it_started_and_keeps_what_it_recorded(tmp_path, monkeypatch):
  child = tmp_path / 'child'
  program = tmp_path / 'python'
  program.write_text(f'#!/bin/sh\necho \'{{"first": 1}}\' > "$4"\nsleep 60 &\necho $! > {child}\necho waits\nwait\n')
  program.chmod(0o755)
  monkeypatch.setattr(sys, 'executable', str(program))
  found = accelerator.run(_job('decode', 'x'), {}, 2)
  assert found['first'] == 1 and found['error'] == 'ended after 2 s: waits' and found['job_s'] < 30
  for _ in range(100):  # it is ended, and init or this process has still to take notice
    status = pathlib.Path(f'/proc/{child.read_text().strip()}/stat')
    if not status.exists() or status.read_text().split()[2] == 'Z':
      break
    time.sleep(0.1)
  else:
    pytest.fail('the process that the job had started goes on')


def test_the_plan_stands_beside_what_was_measured():
  part = {
    'plan': {'memory_gib': {'rollout': 8.0, 'update': 16.0, 'evaluation': 9.0}},
    'compiler': {
      'memory_gib': {'rollout': 7.0, 'update': 12.0},
      'seconds': {'extend': 1.0, 'decode': 4.0, 'arrange': 0.5, 'scoring': 0.25, 'gradients': 2.0, 'optimiser': 0.125},
      'sampled_tokens': 1000,
    },
    'run': {'timed': {
      'peak_memory_gib_until': {'rollout': 6.0, 'update': 13.0}, 'sampled_tokens': 900,
      'seconds': {'rollout': 6.5, 'advantages': 0.5, 'update': 3.0},
    }},
  }  # fmt: skip
  assert accelerator.beside_plan(part) == {
    'memory_gib': {
      'rollout': {'plan': 8.0, 'compiler': 7.0, 'measured_peak': 6.0},
      'update': {'plan': 16.0, 'compiler': 12.0, 'measured_peak': 13.0},
    },
    'seconds': {
      'rollout': {'compiler': 5.5, 'measured': 6.5},
      'advantages': {'compiler': 0.25, 'measured': 0.5},
      'update': {'compiler': 2.125, 'measured': 3.0},
    },
    'sampled_tokens': {'compiler': 1000, 'measured': 900},
  }
  nothing = accelerator.beside_plan({'plan': {'error': 'E'}, 'run': {'left_out': 'no time'}})
  assert nothing['seconds']['update'] == {'compiler': None, 'measured': None}
  assert nothing['memory_gib']['update'] == {'plan': None, 'compiler': None, 'measured_peak': None}


def test_parts_of_an_earlier_run_stay_if_they_are_of_the_same_machine_and_commit(tmp_path):
  out = tmp_path / 'x.json'
  record = {'hardware': {'device': 'H100', 'date': '2026-01-01', 'job_s': 3}, 'commit': 'a', 'seed': 0}
  assert accelerator.kept_parts(out, record, ('decode',)) == {}
  out.write_text(json.dumps(record | {'parity': {'b': 1}, 'decode': {'c': 2}, 'failures': ['decode: E']}))
  assert accelerator.kept_parts(out, record, ('decode',)) == {'parity': {'b': 1}}
  assert accelerator.kept_parts(out, record | {'commit': 'b'}, ('decode',)) == {}
  assert accelerator.kept_parts(out, record | {'hardware': {'device': 'H200', 'date': '2026-01-01'}}, ('decode',)) == {}
  assert accelerator.kept_parts(out, record | {'hardware': {'device': 'H100', 'date': '2026-01-01'}}, ()) == {
    'parity': {'b': 1}, 'decode': {'c': 2}
  }  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize('kernel', ['xla', 'pallas'])
def test_kernels_for_the_cache_attend_as_einsum_does(kernel):
  rng = np.random.default_rng(0)
  b, n, kv, h, s, c = 3, 6, 2, 16, 64, 5

  def normal(*shape):
    return jnp.asarray(rng.normal(size=shape), jnp.float32)

  q, k, v, kept_k, kept_v = normal(b, 1, n, h), *(normal(b, x, kv, h) for x in (c, c, s, s))
  kept = (kept_k, kept_v, jnp.arange(s)[None, None] < jnp.asarray([s, 17, 0])[:, None, None])
  mask = jnp.arange(c)[None, None] <= 2
  attend, einsum = (jax.jit(x) for x in (accelerator_decode.attend_with(kernel, interpret=True), attention._attend))
  np.testing.assert_allclose(attend(q, k, v, mask, kept), einsum(q, k, v, mask, kept), atol=1e-6)
  # Prompts attend as always.
  wide = jnp.tile(q, (1, 2, 1, 1))
  np.testing.assert_array_equal(attend(wide, k, v, mask, kept), einsum(wide, k, v, mask, kept))


@pytest.mark.parametrize('kernel', ['xla', 'pallas'])  # cuDNN's is lowered only where there is a GPU
def test_kernels_for_the_cache_lower_for_a_gpu(kernel):
  """At the benchmark's shape."""
  (rows, prompt, new), shape = accelerator_work.FULL.decode, accelerator_work.SHAPE
  attend = accelerator_decode.attend_with(kernel)

  def heads(columns, count):
    return jax.ShapeDtypeStruct((rows, columns, count, shape.head_dim), jnp.bfloat16)

  def mask(rows, columns):
    return jax.ShapeDtypeStruct((rows, 1, columns), bool)

  k, kept_k = (heads(x, shape.num_kv_heads) for x in (new, prompt + new))
  args = (heads(1, shape.num_heads), k, k, mask(1, new), (kept_k, kept_k, mask(rows, prompt + new)))
  try:
    text = jax.jit(attend).trace(*args).lower(lowering_platforms=('cuda',)).as_text()
  except RuntimeError as e:
    if 'No supported GPU devices' not in str(e):
      raise
    pytest.skip('this JAX lowers kernels of Pallas only where there is a GPU')
  assert {'xla': 'dot_general', 'pallas': 'triton'}[kernel] in text


@pytest.mark.slow
def test_a_kernel_that_fails_is_recorded_and_the_others_are_timed(monkeypatch):
  def broken(*_, **__):
    raise AssertionError('the first line\nand more')

  monkeypatch.setattr(accelerator_decode, '_library', broken)
  model = Qwen(accelerator_work.QUICK_SHAPE, rngs=nnx.Rngs(0))
  found, before = {}, attention._attend
  accelerator_decode.time_kernels(model, (2, 8, 4), 1e9, found.update, ('einsum', 'xla', 'cudnn', 'einsum'))
  assert attention._attend is before
  assert found['xla'] == {'error': 'AssertionError: the first line'}
  assert found['cudnn'] == {'left_out': 'needs a GPU, and the device is a CPU'}
  timed = found['einsum']
  assert timed['logprob_gap'] == 0 and timed['tokens_per_s'] == pytest.approx(2 / timed['ms_per_step'] * 1e3)
  bytes_read = sum(x.nbytes for x in jax.tree.leaves(accelerator_decode.sampler_of(model)[1]))
  bytes_read += 2 * 2 * 2 * (8 + 2) * 2 * 16 * 4
  assert timed['share_of_bandwidth'] == pytest.approx(bytes_read / 1e9 / (timed['ms_per_step'] / 1e3), rel=1e-6)


def test_log_probs_are_compared_while_tokens_are_equal():
  tokens, logprobs = np.array([[1, 2, 3], [4, 5, 6]]), np.zeros((2, 3))
  others, other_logprobs = np.array([[1, 9, 3], [4, 5, 6]]), np.array([[0.1, 7.0, 7.0], [0.0, -0.25, 0.0]])
  assert accelerator_decode.logprob_gap(tokens, logprobs, others, other_logprobs) == 0.25


def test_differences_are_relative_and_nan_is_above_every_limit():
  expected = {'logits': np.array([1.0, -4.0]), 'logprobs': np.array([-2.0]),
              'gradient': {'a': np.array([3.0]), 'b': np.array([0.0, 4.0])}}  # fmt: skip
  found = {'logits': np.array([1.0, -4.2]), 'logprobs': np.array([-2.1]),
           'gradient': {'a': np.array([3.0]), 'b': np.array([0.3, 4.4])}}  # fmt: skip
  told = accelerator_numbers.differences(found, expected)
  assert told == pytest.approx({'logits': 0.05, 'logprobs': 0.05, 'gradient': 0.1})
  assert accelerator_numbers.over_limits(told) == ['logits', 'logprobs', 'gradient']
  fine = {'logits': 9e-5, 'logprobs': 9e-5, 'gradient': 9e-4}
  assert accelerator_numbers.over_limits(fine) == []
  assert accelerator_numbers.over_limits(fine | {'logits': float('nan')}) == ['logits']


@pytest.mark.slow
def test_an_unknown_part_is_refused():
  found = copy_python(None, '--parts=decod', name='benchmarks/accelerator.py')
  assert found.returncode == 1
  assert found.stderr == 'error: --parts=decod: allowed: parity, attention, decode, iteration, main_job\n'


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_all_parts_run_on_a_cpu(tmp_path):
  out = tmp_path / 'found.json'
  command = [sys.executable, 'benchmarks/accelerator.py', '--quick', '--seed=3', '--flops=1e12', '--bandwidth=1e10',
             f'--out={out}']  # fmt: skip
  subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=880)
  found = json.loads(out.read_text())
  assert found['seed'] == 3 and found['failures'] == [] and '--quick' in found['command']
  assert found['hardware'].keys() >= {'cpu', 'cores', 'device', 'jax', 'python', 'date', 'backend'}
  # The CPU is the device, so the programs are the same; bfloat16 and the other library's program are not.
  parity = found['parity']
  assert set(parity['device_and_cpu_float32'].values()) == {0.0} and parity['over_limits'] == []
  rounded = parity['device_bfloat16_and_cpu_float32']
  assert all(1e-4 < rounded[name] < 0.1 for name in ('logits', 'logprobs', 'gradient'))
  library = parity['transformers']
  if 'left_out' not in library:
    assert library['equal_greedy_tokens'] == 1
    assert all(0 < library[name] < 1e-5 for name in ('logits', 'logprobs', 'gradient'))
  assert 'left_out' in found['attention']['cudnn']
  for packing in ('whole', 'packed'):
    assert found['attention']['einsum'][packing]['gradient_difference'] == 0
    assert 0 < found['attention']['blocks'][packing]['gradient_difference'] < 1e-5
  decoded = found['decode']
  assert decoded.keys() == {'default', 'triton GEMM off', 'transformers'}
  for flags in ('default', 'triton GEMM off'):
    assert decoded[flags]['einsum']['tokens_per_s'] > 0 and 0 < decoded[flags]['xla']['logprob_gap'] < 1e-4
  timed, size = found['iteration']['run']['timed'], found['iteration']['run']['parameters']
  used = 6 * size * timed['computed_tokens'] / 1e12 / timed['seconds']['update']
  assert timed['update_mfu'] == pytest.approx(used) and timed['finite'] and timed['compile_s'] == 0
  assert found['iteration']['run']['first']['compile_s'] > 0
  beside = found['iteration']['beside_plan']
  assert beside['memory_gib']['update']['plan'] > beside['memory_gib']['rollout']['plan'] > 0
  assert beside['seconds']['update'] == {'compiler': None, 'measured': timed['seconds']['update']}
  assert found['main_job']['iterations'] == 2 and 0 < found['main_job']['sampled'][0] < found['main_job']['optimal']
