"""The compiler of TPUs on the programs of a real model's shape, where it is installed (requirements-aot.txt)."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys

import pytest

from benchmarks import aot, aot_tables
from ragen_jax.planning import programs, topologies
from ragen_jax.planning.cost import Cost
from ragen_jax.planning.estimate import Measured
from ragen_jax.planning.kernel_times import Work
from tests.support.configs import small_config
from tests.support.paths import ROOT

needs_libtpu = pytest.mark.skipif(
  importlib.util.find_spec('libtpu') is None, reason='needs the compiler of TPUs: pip install -r requirements-aot.txt'
)


def _run(*command):
  return subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, check=False)


@needs_libtpu
@pytest.mark.slow
def test_every_program_of_a_real_shape_compiles_for_a_tpu(tmp_path):
  """Two layers of Qwen2.5-0.5B on four chips, by the command that users call."""
  shape = {
    'architectures': ['Qwen2ForCausalLM'], 'vocab_size': 151936, 'hidden_size': 896, 'intermediate_size': 4864,
    'num_hidden_layers': 2, 'num_attention_heads': 14, 'num_key_value_heads': 2, 'tie_word_embeddings': True,
  }  # fmt: skip
  (tmp_path / 'config.json').write_text(json.dumps(shape))
  fields = ['plan.topology=v5e:2x2', f'model.path={tmp_path}', 'optimizer.micro_batch_size=4', 'mesh.tensor=2']
  fields += ['agent.max_context=512', 'agent.max_response_tokens=128', 'train.groups=4', 'train.group_size=4']
  fields += ['eval.groups=4', 'optimizer.mini_batch_size=8', 'plan.prompt_tokens=200', 'plan.turns=2']
  config = '--config=configs/frozenlake_ppo.py:qwen2.5-0.5b'
  result = _run('main.py', '--mode=plan', config, *(f'--config.{field}' for field in fields))
  assert result.returncode == 0, result.stderr
  text = result.stdout
  assert 'on v5e:2x2, 4 x TPU v5 lite (data=2, fsdp=1, tensor=2)' in text and 'refused' not in text
  programs_of_it = ('extend_first', 'extend_later', 'decode', 'resize', 'score', 'gradient', 'apply')
  assert all(f'\n{name} ' in text for name in programs_of_it)
  assert "Times are the compiler's cycles" in text and 'It fits' in text and 'nan' not in text


@needs_libtpu
def test_one_program_compiles_for_a_tpu_and_cycles_are_read():
  script = """
from ragen_jax.planning import cost, topologies
topology = topologies.parse('v5e:2x4')
topologies.prepare(topology)
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
mesh = Mesh(np.asarray(topologies.devices(topology)), ('x',))
x = jax.ShapeDtypeStruct((8192, 8192), jnp.bfloat16, sharding=NamedSharding(mesh, P()))
y = jax.ShapeDtypeStruct((8192, 8192), jnp.bfloat16, sharding=NamedSharding(mesh, P('x')))
found = cost.compile_program(jax.jit(lambda a, b: (a @ a, b.sum(0))).lower(x, y), topology)
print(found.timed, found.work.seconds, sorted(found.work.collectives), found.hbm)
"""
  result = _run('-c', script)
  assert result.returncode == 0, result.stderr
  timed, seconds, *collectives, hbm = result.stdout.split()
  assert timed == 'True' and 'all-reduce' in ''.join(collectives)
  ideal = 2 * 8192**3 / topologies.CHIPS['v5e'].flops
  assert ideal < float(seconds) < 2 * ideal
  assert int(hbm) > 2 * 2 * 8192**2


# -- benchmarks/aot.py -------------------------------------------------------------------------------------------------


def _fields_are_allowed(case):
  config = small_config()
  config.update_from_flattened_dict(aot.LENGTHS | case.fields)
  topologies.parse(case.topology)


def test_cases_of_the_benchmark_name_fields_and_machines_that_there_are():
  for case in aot.CASES.values():
    _fields_are_allowed(case)
  assert set(aot.QUICK) <= set(aot.CASES)


def test_a_compiler_that_crashes_loses_one_program(monkeypatch, tmp_path):
  """A worker that dies in its second program, and would do so each time."""
  script = tmp_path / 'worker.py'
  script.write_text("""
import json, os, sys
log = [x for x in sys.argv if x.startswith('--log=')][0].removeprefix('--log=')
done = [json.loads(line) for line in open(log)] if os.path.exists(log) else []
done = {x['program'] for x in done if 'seconds' in x or 'failure' in x}
with open(log, 'a') as f:
  for name in ('one', 'two', 'three'):
    if name in done:
      continue
    f.write(json.dumps({'program': name, 'started': True}) + '\\n'); f.flush()
    if name == 'two':
      sys.stderr.write('checked failed\\n'); sys.stderr.flush()
      os._exit(134)
    f.write(json.dumps({'program': name, 'seconds': 1.0}) + '\\n'); f.flush()
  steps = {'decode': 9, 'idle': 0.2}
  f.write(json.dumps({'estimate': {'iteration': 3.0, 'mfu': 0.5, 'chip_hours': 1.0, 'rollout': steps}}) + '\\n')
""")
  monkeypatch.setattr(aot, '__file__', str(script))
  arguments = type('Arguments', (), {'missing': False, 'quick': False, 'output': tmp_path / 'results' / 'aot.json'})
  results = {'cases': {}}
  aot.measure('0.5b v5e:2x4', '*', results, arguments)
  written = json.loads(arguments.output.read_text())['cases']['0.5b v5e:2x4']
  assert written['programs']['one']['seconds'] == written['programs']['three']['seconds'] == 1.0
  assert 'status 134: checked failed' in written['programs']['two']['failure']
  assert written['estimate']['iteration'] == 3.0 and 'failure' not in written
  assert aot.summary('x', written) == 'x: iteration 3.00 s, 9 decode steps with 20% idle rows, MFU 50%, chip-hours 1.00'


def test_a_measured_program_comes_back_from_its_record():
  program = programs.Program('decode', 'decode', 'rollout', '8 rows', lambda: None, 5.0, 7)
  work = Work(1.0, 2, {'all-gather': 3}, 4.0, 0.5, (Work(5.0, 6),))
  made = Measured(program, Cost(1, 2, 3, 4, 5.0, 6.0, work, True))
  record = json.loads(json.dumps(aot._record(made, topologies.parse('v5e:2x4'))))
  assert aot._recalled(program, record) == made
  refused = Measured(program, None, 'too large')
  assert aot._recalled(program, json.loads(json.dumps(aot._record(refused, None)))) == refused


def test_tables_are_put_between_their_marks(tmp_path):
  results = {'cases': {'0.5b v5e:2x4': {'programs': {}, 'estimate': None}}}
  page, file = tmp_path / 'page.md', tmp_path / 'aot.json'
  page.write_text(
    '# Title\n\n<!-- table: programs -->\nold\n<!-- end -->\n\n<!-- table: other -->\nkept\n<!-- end -->\n'
  )
  file.write_text(json.dumps(results))
  aot_tables.write_page(page, file, tmp_path / 'none.json')
  once = page.read_text()
  assert 'old' not in once and 'kept' in once and '| Program |' in once
  aot_tables.write_page(page, file, tmp_path / 'none.json')
  assert page.read_text() == once


@pytest.mark.parametrize(
  ('made', 'ahead', 'cell'),
  [
    ({'awaited': [90.0, 179.4], 'last_awaited': 9}, True, '179, 9'),
    ({'last_new': 166}, True, '-'),
    ({'last_new': 166}, False, '681, 166'),
  ],
)
def test_awaited_seconds_are_those_of_all_programs_only_where_none_were_compiled_ahead(made, ahead, cell):
  made = made | {'programs': [1, 2], 'cpu_seconds': [365.0, 681.0]}
  part = {'device': 1.0, 'links': 0.0}
  parts = dict.fromkeys(('extend', 'decode', 'arrange', 'scoring', 'gradients', 'optimiser'), part)
  estimate = {
    'parts': parts, 'compilation': made, 'memory': {}, 'iteration': 6.0, 'mfu': 0.5, 'decode_to_floor': 1.0,
    'decode': {'gathered': 0.0}, 'chip_hours': 1.0,
  }  # fmt: skip
  head, _, row = aot_tables.cases_table({'cases': {'x': {'estimate': estimate}}}, ahead=ahead).splitlines()
  assert head.split(' | ')[-2].startswith('of these awaited at least') == ahead and row.split(' | ')[-2] == cell


def test_an_unknown_case_is_refused_with_those_that_there_are():
  result = subprocess.run(
    [sys.executable, 'benchmarks/aot.py', '--only=9b'], cwd=ROOT, capture_output=True, text=True, check=False,
    env=os.environ | {'COLUMNS': '1000'},
  )  # fmt: skip
  assert result.returncode == 2 and 'no such case; there are: 0.5b v5e:2x4; ' in result.stderr
