"""Foreign code that ends the process, or makes copies of it, is named, and the exit status is not 0."""

from __future__ import annotations

import signal

import pytest

from tests.support.processes import copy_python, run_main

# Two episodes of a deadly game, as a rollout plays them; then what is said of children.
_PLAY = """
import gc, sys, threading
import numpy as np
from ml_collections import ConfigDict
from ragen_jax import build
from ragen_jax.agent.pools import make_pool
from ragen_jax.utils import foreign

def play(how, workers):
  numbers = {'max_turns': 3, 'max_actions': 6, 'max_actions_per_turn': 1, 'max_words': 50}
  game = {'type': 'python', 'class_path': 'tests.support.deadly:Deadly', 'options': {'how': how}, 'workers': workers}
  config = ConfigDict({'envs': {'Lethal': game | numbers}, 'agent': {'max_response_tokens': 32}})
  (spec,) = build.env_specs(config, ('Lethal',), (2,))
  pool = make_pool(spec, 2, 1)
  pool.reset(np.arange(2), np.zeros(2, int))
  for _ in range(3):
    pool.step([['go']] * 2)
  print(how, pool.used.tolist(), [str(x) for x in pool.faults.values()])

for how in sys.argv[2:]:
  play(how, int(sys.argv[1]))
gc.collect()
print(foreign.end_children())
"""


@pytest.mark.parametrize('workers', ['0', '1'])
def test_an_environment_that_ends_the_process_is_named_and_the_status_is_not_0(workers):
  done = copy_python(_PLAY, workers, 'exit', timeout=100)
  assert done.returncode == 1 and not done.stdout
  (error,) = [line for line in done.stderr.splitlines() if 'error' in line]
  assert error.startswith('error: envs.Lethal: ended the process of the run by os._exit(0) (deadly.py:')


@pytest.mark.parametrize(('status', 'seen'), [(256, 1), (512 + 3, 3), (7, 7)])
def test_an_end_by_foreign_code_never_looks_like_success(status, seen):
  """The system keeps the last eight bits of a status."""
  code = f"""
import os
from ragen_jax.utils import foreign
with foreign.calling('a'):
  os._exit({status})
"""
  done = copy_python(code, timeout=60)
  assert done.returncode == seen and f'error: a: ended the process of the run by os._exit({status}) (' in done.stderr


def test_a_crash_names_the_environment_in_the_stack_traces():
  done = copy_python(_PLAY, '1', 'crash', timeout=100)
  assert done.returncode == -signal.SIGSEGV and not done.stdout
  assert 'Segmentation fault' in done.stderr and 'in envs.Lethal' in done.stderr
  assert 'deadly.py' in done.stderr  # the line that crashed


@pytest.mark.parametrize('workers', ['0', '1'])
@pytest.mark.slow_cases('0')
def test_children_of_fork_do_not_go_on_as_the_run_and_those_that_crash_or_stay_are_named(workers):
  # All processes hold the pipes of this test, so none is left when the call returns.
  hows = ('come back', 'stay', 'crash in a child', 'wait', 'stay in a process', 'daemon')
  done = copy_python(_PLAY, workers, *hows, timeout=100)
  assert done.returncode == 0, done.stderr
  *played, told = done.stdout.splitlines()
  assert played == [f'{how} [3, 3] []' for how in hows]  # once each
  problems = told.split('; ')
  assert [problem.partition(' (pid ')[0] for problem in sorted(problems)] == [
    'envs.Lethal: a child that it made by fork came back, as a second copy of the run',
    'envs.Lethal: a child that it made by fork crashed with SIGSEGV',
    'envs.Lethal: a child that it made by fork was still running at the end',
  ]


@pytest.mark.slow
def test_the_number_of_children_is_bounded():
  code = """
import os, time
from ragen_jax.utils import foreign
foreign._MOST_CHILDREN = 3
with foreign.calling('a'):
  for i in range(6):  # more, but they end
    if not os.fork():
      os._exit(0)
    time.sleep(0.2)
  for i in range(4):
    try:
      if not os.fork():
        time.sleep(60)
        os._exit(0)
    except BlockingIOError as e:
      print(i, e.strerror)
print(foreign.end_children())
"""
  done = copy_python(code, timeout=60)
  refused, told = done.stdout.splitlines()
  assert refused == '3 3 children that a made by fork are running'
  assert told.startswith('a: a child that it made by fork was still running at the end (pid ')


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
def test_a_run_whose_environment_leaves_children_fails_at_its_end(tmp_path):
  path = tmp_path / 'config.py'
  path.write_text("""
from ml_collections import ConfigDict

from tests.support.configs import small_config


def get_config():
  config = small_config(num_iterations=1, train__groups=1, eval__groups=2, train__group_size=2, eval__greedy_too=False)
  config.optimizer.mini_batch_size = config.optimizer.micro_batch_size = 2
  config.agent.max_response_tokens = 8
  with config.unlocked():
    config.envs.Lethal = ConfigDict({
      'type': 'python', 'class_path': 'tests.support.deadly:Deadly', 'options': {'how': 'stay'},
      'max_turns': 3, 'max_actions': 6, 'max_actions_per_turn': 2, 'max_words': 50,
    })
  config.train.tags = config.eval.tags = ('Lethal',)
  return config
""")
  done = run_main(f'--config={path}', f'--workdir={tmp_path / "run"}', timeout=500)
  assert done.returncode == 2, done.stderr
  assert done.stderr.splitlines()[-1].startswith('error: envs.Lethal: a child that it made by fork was still running')
