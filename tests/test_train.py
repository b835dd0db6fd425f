"""The whole loop: it learns, it resumes to the last bit, and it compiles few programs."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import types

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboardX.proto.plugin_hparams_pb2 import HParamsPluginData

from ragen_jax import build, train
from ragen_jax.evaluation.evaluator import Evaluator
from ragen_jax.runs.interrupt import Stopped
from ragen_jax.runs.metrics import read_metrics
from ragen_jax.runs.workdir import record_config
from ragen_jax.training.trainer import Trainer
from ragen_jax.utils import mappings
from ragen_jax.utils.errors import Diverged, UserError
from tests.support.configs import small_config
from tests.support.damage import flip_bytes
from tests.support.events import read_events
from tests.support.metrics import comparable_metrics
from tests.support.paths import ROOT
from tests.support.processes import copy_python


@pytest.mark.slow
@pytest.mark.parametrize('estimator', ['gae', 'grpo'])
@pytest.mark.exhaustive_cases('gae')
def test_a_run_that_was_stopped_goes_on_as_if_it_had_not_been(tmp_path, estimator):
  fields = {'algorithm__adv_estimator': estimator, 'eval__greedy_too': False, 'eval__every': 1}
  config = small_config(num_iterations=2, **fields)
  train.train_and_evaluate(config, str(tmp_path / 'whole'))
  stopped = small_config(num_iterations=1, **fields)
  train.train_and_evaluate(stopped, str(tmp_path / 'parts'))
  train.train_and_evaluate(config, str(tmp_path / 'parts'))
  whole, parts = comparable_metrics(tmp_path / 'whole'), comparable_metrics(tmp_path / 'parts')
  assert [line['step'] for line in whole] == [0, 1, 2]
  assert whole == parts  # floats, to the last bit
  kept = [{p.name: p.read_bytes() for p in (tmp_path / run / 'episodes').iterdir()} for run in ('whole', 'parts')]
  assert kept[0] == kept[1] and sorted(kept[0]) == [
    'eval-00000000.jsonl.gz', 'eval-00000001.jsonl.gz', 'eval-00000002.jsonl.gz', 'train-00000001.jsonl.gz'
  ]  # fmt: skip
  assert whole[2]['actor/grad_norm'] > 0 and whole[1]['actor/pg_loss'] != whole[2]['actor/pg_loss']


@pytest.mark.slow
def test_a_run_that_drops_its_programs_computes_the_same(tmp_path, monkeypatch, caplog):
  caplog.set_level('INFO', 'ragen_jax')
  config = small_config(num_iterations=2, eval__greedy_too=False, eval__every=1)
  train.train_and_evaluate(config, str(tmp_path / 'kept'))
  assert 'programs are dropped' not in caplog.text
  monkeypatch.setattr(mappings, '_MOST', 0)
  train.train_and_evaluate(config, str(tmp_path / 'dropped'))
  assert len([m for m in caplog.messages if 'programs are dropped' in m]) == 2
  assert comparable_metrics(tmp_path / 'kept') == comparable_metrics(tmp_path / 'dropped')


@pytest.mark.exhaustive
def test_a_run_whose_newest_checkpoint_is_damaged_goes_on_from_the_one_before(tmp_path, caplog):
  fields = {'eval__greedy_too': False, 'eval__every': 1}
  train.train_and_evaluate(small_config(num_iterations=3, **fields), str(tmp_path / 'whole'))
  damaged = tmp_path / 'damaged'
  train.train_and_evaluate(small_config(num_iterations=2, **fields), str(damaged))
  flip_bytes(damaged, 2)
  with caplog.at_level('WARNING'):
    train.train_and_evaluate(small_config(num_iterations=3, **fields), str(damaged))
  (warning,) = [r.getMessage() for r in caplog.records if 'is damaged' in r.getMessage()]
  assert warning.startswith('checkpoint of step 2 is damaged (') and warning.endswith('resuming from step 1')
  assert (damaged / 'damaged_checkpoints' / '2').is_dir()
  assert comparable_metrics(damaged) == comparable_metrics(tmp_path / 'whole')  # floats, to the last bit


@contextlib.contextmanager
def _noting(told, config, trainer, *_):
  """Notes which iterations the threads that compile ahead are told of."""
  listener = types.SimpleNamespace(runs=lambda *_: None, played=lambda rollout, iteration: told.append(iteration))
  with trainer.model.sampler.observer.told_to(listener):
    yield


@pytest.mark.slow
def test_ctrl_c_saves_the_iteration_and_the_run_goes_on_as_if_nothing_had_been(tmp_path, monkeypatch, request):
  # Ignored where the tests themselves were started in the background.
  before = signal.signal(signal.SIGINT, signal.default_int_handler)
  request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
  config = small_config(num_iterations=3, checkpoint__every=0, eval__every=0, eval__greedy_too=False)
  told = []
  with monkeypatch.context() as patched:
    patched.setattr(train.ahead, 'open_ahead', functools.partial(_noting, told))
    train.train_and_evaluate(config, str(tmp_path / 'whole'))
  assert told == [0, 1, 2, 3, 3]  # evaluations before and after, and three rollouts
  update, collect = Trainer.update, Trainer.collect

  def stopped_while_waiting(self, state):  # as when agent programs play
    if state.iteration == 1:
      raise Stopped(signal.SIGINT)
    return collect(self, state)

  monkeypatch.setattr(Trainer, 'collect', stopped_while_waiting)
  with pytest.raises(Stopped):
    train.train_and_evaluate(config, str(tmp_path / 'parts'))
  monkeypatch.undo()
  assert [p.name for p in (tmp_path / 'parts' / 'checkpoints').iterdir()] == ['1']

  def interrupted(self, state, *rest):
    if state.iteration == 1:  # the second iteration
      os.kill(os.getpid(), signal.SIGINT)
    return update(self, state, *rest)

  monkeypatch.setattr(Trainer, 'update', interrupted)
  with pytest.raises(KeyboardInterrupt) as stopped:
    train.train_and_evaluate(config, str(tmp_path / 'parts'))
  assert stopped.value.status == 130
  monkeypatch.undo()
  assert sorted(p.name for p in (tmp_path / 'parts' / 'checkpoints').iterdir()) == ['1', '2']
  assert signal.getsignal(signal.SIGINT) is signal.default_int_handler

  def stopped_while_evaluating(self, params, step=0):  # as when agent programs play
    raise Stopped(signal.SIGINT)

  monkeypatch.setattr(Evaluator, '__call__', stopped_while_evaluating)
  with pytest.raises(Stopped):
    train.train_and_evaluate(config, str(tmp_path / 'parts'))
  monkeypatch.undo()
  assert '3' in [p.name for p in (tmp_path / 'parts' / 'checkpoints').iterdir()]
  train.train_and_evaluate(config, str(tmp_path / 'parts'))
  assert comparable_metrics(tmp_path / 'whole') == comparable_metrics(tmp_path / 'parts')


def test_the_players_are_closed_before_the_run_waits_for_compilers(tmp_path, monkeypatch):
  order = []

  @contextlib.contextmanager
  def open_players(*_):
    yield {'train': None, 'eval': None}
    order.append('players')

  monkeypatch.setattr(train.build, 'load_policy', lambda _: None)
  monkeypatch.setattr(train.build, 'make_evaluator', lambda *_: types.SimpleNamespace(held_out=lambda: None))
  monkeypatch.setattr(train.build, 'make_trainer', lambda *_: None)
  monkeypatch.setattr(train.build_agents, 'open_players', open_players)
  monkeypatch.setattr(train, '_iterate', lambda *_: order.append('iterations'))
  monkeypatch.setattr(train.Background, 'close', lambda self: (self.stop(), order.append(f'{self.threads} threads')))
  train._train(small_config(compile_ahead=2), str(tmp_path))
  assert order == ['iterations', 'players', '2 threads']


@pytest.mark.parametrize(
  ('tag', 'words'), [('Agent', 'at once while agent programs play'), ('FrozenLake', 'iteration')]
)
def test_players_and_run_notice_the_same_signal(tmp_path, monkeypatch, capfd, tag, words):
  seen = []

  @contextlib.contextmanager
  def open_players(config, model, workdir, interrupt):
    seen.append(interrupt)
    yield {'train': None, 'eval': None}

  monkeypatch.setattr(train.build, 'load_policy', lambda _: None)
  monkeypatch.setattr(train.build, 'make_evaluator', lambda *_: types.SimpleNamespace(held_out=lambda: None))
  monkeypatch.setattr(train.build, 'make_trainer', lambda *_: None)
  monkeypatch.setattr(train.build_agents, 'open_players', open_players)
  monkeypatch.setattr(train, '_iterate', lambda *given: seen.append(given[-1]))
  train._train(small_config(train__tags=(tag,), eval__tags=(tag,)), str(tmp_path))
  assert seen[0] is seen[1]
  seen[0]._on_signal(signal.SIGUSR1, None)
  signal.signal(signal.SIGUSR1, signal.SIG_DFL)
  assert words in capfd.readouterr().err
  with pytest.raises(Stopped):
    seen[0].check()


@pytest.mark.parametrize(
  ('fields', 'words'),
  [
    ({'optimizer__actor_lr': 1e30}, r'new weights policy/embed_tokens and \d+ more in optimiser steps 1, 2 of 2'),
    # One step makes weights that are finite, and of no use.
    (
      {'optimizer__actor_lr': 1e15, 'optimizer__mini_batch_size': 16, 'eval__every': 0},
      r'sampled log-probs \(all 16 rows\)',
    ),
  ],
)  # fmt: skip
@pytest.mark.slow
@pytest.mark.exhaustive_cases('fields1-sampled log-probs \\\\(all 16 rows\\\\)')
def test_a_run_whose_numbers_are_not_finite_says_so_saves_none_of_it_and_fails(tmp_path, capsys, fields, words):
  config = small_config(num_iterations=9, eval__greedy_too=False, **fields)
  with pytest.raises(Diverged, match=rf'^iterations 1 to 3: numbers are not finite, .*{words}') as e:
    train.train_and_evaluate(config, str(tmp_path))
  assert e.value.status == 1 and '\n' not in str(e.value)
  assert not list(tmp_path.glob('checkpoints/*'))
  told = [line for line in capsys.readouterr().err.splitlines() if ': not finite: ' in line]
  assert [line.split(':')[0] for line in told] == [f'iteration {i}' for i in (1, 2, 3)]
  lines = read_metrics(tmp_path)
  assert [line['step'] for line in lines] == [0, 1, 2, 3]
  if 'eval__every' not in fields:
    assert [line['train/skipped_steps'] for line in lines[1:]] == [2, 2, 2]
    # The weights are those before the first step.
    assert lines[2]['val-env/success'] == lines[0]['val-env/success']
  else:
    assert lines[2]['not_finite/sampled_logprobs'] > 0 and lines[2]['train/num_mini_batches'] == 0


@pytest.mark.slow
@pytest.mark.parametrize('mode', ['train', 'sft'])
@pytest.mark.exhaustive_cases('sft', 'train')
def test_the_exit_status_of_a_run_whose_numbers_are_not_finite_is_1(tmp_path, mode):
  fields = [
    'train.groups=16', 'eval.groups=16', 'eval.group_size=1', 'optimizer.mini_batch_size=64',
    'optimizer.actor_lr=1e30', 'sft.learning_rate=1e30',
    'sft.levels=(64,)', 'sft.batch_size=16', f'sft.output={tmp_path}/out',
  ]  # fmt: skip
  command = [
    sys.executable, 'main.py', f'--mode={mode}', f'--workdir={tmp_path}/run', '--config=configs/frozenlake_ppo.py',
    *(f'--config.{field}' for field in fields),
  ]  # fmt: skip
  done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=500)
  assert done.returncode == 1, done.stderr[-2000:]
  assert re.search(r'^error: .*not finite.*there is no checkpoint', done.stderr, re.MULTILINE)
  assert 'Traceback' not in done.stderr
  assert not (tmp_path / 'out').exists() and not list((tmp_path / 'run').glob('checkpoints/*'))


def test_what_does_not_fit_into_the_context_is_told_before_anything_is_played(tmp_path, monkeypatch):
  monkeypatch.setattr(Evaluator, '__call__', lambda *_: pytest.fail('evaluated'))
  config = small_config(train__tags=('Countdown',), agent__max_context=128)
  with pytest.raises(
    UserError, match=r'agent\.max_context=128: a first prompt of Countdown and its reply need \d+ \+ 32'
  ):
    train.train_and_evaluate(config, str(tmp_path))


@pytest.fixture(scope='module')
def finished_run(tmp_path_factory):
  """Config, workdir and last evaluation of a short run."""
  workdir = tmp_path_factory.mktemp('finished')
  config = small_config(num_iterations=1)
  return config, workdir, train.train_and_evaluate(config, str(workdir))


@pytest.mark.slow
def test_a_finished_run_started_again_changes_nothing(finished_run):
  config, workdir, first = finished_run
  lines = (workdir / 'metrics.jsonl').read_text()
  assert train.train_and_evaluate(config, str(workdir)) == first
  assert (workdir / 'metrics.jsonl').read_text() == lines


@pytest.mark.slow
def test_a_finished_run_whose_metrics_were_deleted_says_so_and_ends_well(finished_run, tmp_path, capsys, caplog):
  config, workdir, _ = finished_run
  copy = tmp_path / 'copy'
  shutil.copytree(workdir, copy)
  (copy / 'metrics.jsonl').unlink()
  assert train.train_and_evaluate(config, str(copy)) == {}
  assert 'has no evaluation, so it was deleted' in caplog.text and str(copy) in capsys.readouterr().out


@pytest.mark.slow
def test_a_run_leaves_its_episodes_for_people(finished_run, capsys):
  config, workdir, _ = finished_run
  page = workdir / 'trajectories.html'
  tags = {value.tag for event in read_events(workdir / 'tb') for value in event.summary.value}
  listed = json.loads(re.search(r'id="data">(.*?)</script>', page.read_text(), re.DOTALL)[1])['episodes']
  kept = [(e['step'], e['split']) for e in listed]
  # 16 held-out levels, sampled and greedy, before and after; 16 of 16 episodes of the one iteration.
  assert {x: kept.count(x) for x in kept} == {
    (0, 'val'): 16, (0, 'val-greedy'): 16, (1, 'val'): 16, (1, 'val-greedy'): 16, (1, 'train'): 16
  }  # fmt: skip
  levels = [{e['level'] for e in listed if (e['step'], e['split']) == x} for x in ((0, 'val'), (1, 'val'))]
  assert levels[0] == levels[1] and len(levels[0]) == config.eval.groups
  count = config.logging.trajectories
  for split in ('train', 'val'):
    assert len([tag for tag in tags if tag.startswith(f'{split}/boards/')]) == count
    assert len([tag for tag in tags if tag.startswith(f'{split}/generations/')]) == count
  page.unlink()
  train.train_and_evaluate(config, str(workdir))  # finished: shows its table again, and the page
  assert str(page) in capsys.readouterr().out and page.exists()


@pytest.mark.slow
def test_tensorboard_has_all_there_is_to_see(finished_run):
  config, workdir, last = finished_run
  events = EventAccumulator(str(workdir / 'tb'), size_guidance={'scalars': 0}).Reload()
  tags = events.Tags()
  rows = read_metrics(workdir)
  assert set(tags['scalars']) == set().union(*rows) - {'step'}
  for name in ('actor/entropy', 'val-env/success', 'timing_s/gen', 'perf/throughput', 'perf/max_host_memory_gb'):
    shown = [(e.step, e.value) for e in events.Scalars(name)]
    assert shown == [(row['step'], np.float32(row[name])) for row in rows if name in row] and shown[0][1] > 0, name
  assert set(tags['histograms']) == {'actor/ratio', 'critic/advantages'}
  (ratios,) = (e.histogram_value for e in events.Histograms('actor/ratio'))
  (advantages,) = (e.histogram_value for e in events.Histograms('critic/advantages'))
  assert ratios.num == advantages.num > 100 and ratios.min < 1 < ratios.max
  assert len(tags['images']) == len([t for t in tags['tensors'] if t.endswith('/text_summary')]) > 0
  start, table = (
    HParamsPluginData.FromString(events.SummaryMetadata(f'_hparams_/{tag}').plugin_data.content)
    for tag in ('session_start_info', 'experiment')
  )
  columns = start.session_start_info.hparams
  assert columns['algorithm.clip_ratio_high'].number_value == config.algorithm.clip_ratio_high
  assert columns['envs.FrozenLake.max_turns'].number_value == config.envs.FrozenLake.max_turns
  assert not [name for name in columns if name.startswith(('envs.Sudoku', 'sft.'))]
  newest = {m.name.tag: events.Scalars(m.name.tag)[-1].value for m in table.experiment.metric_infos}
  assert newest == {
    name: np.float32(last[name])
    for name in ('val-env/success', 'val-env/FrozenLake/success', 'val-greedy/FrozenLake/success')
  }


@pytest.mark.slow
def test_every_metric_and_file_of_a_run_is_explained(finished_run):
  _, workdir, _ = finished_run
  page = (ROOT / 'docs' / 'metrics.md').read_text()
  explained = set()
  for name in re.findall(r'`([^`\s]+)`', page):
    one_of = re.fullmatch(r'(.*)\{(.*)\}(.*)', name)
    explained |= {one_of[1] + x + one_of[3] for x in one_of[2].split(',')} if one_of else {name}
  logged, metrics = set(), set().union(*read_metrics(workdir))
  for name in metrics:
    if name.removesuffix('_ema') in metrics - {name}:
      continue
    name = re.sub('pass@4|pass@1', 'pass@G', name.replace('FrozenLake', 'TAG'))
    logged |= {name} if name in explained else {re.sub('^(train|val-env|val-greedy)/TAG', 'TAG', name)}
  assert len(logged) > 40
  assert sorted(logged - explained) == []
  assert not {f'{p.name}/' * p.is_dir() or p.name for p in workdir.iterdir()} - explained - {'checkpoints/'}


def test_a_workdir_of_another_config_is_refused(tmp_path):
  record_config(str(tmp_path), small_config().to_dict())
  (tmp_path / 'checkpoints' / '1').mkdir(parents=True)
  config = small_config(algorithm__gamma=0.9, sft__steps=7, eval__step='best')  # the latter two are not read
  with pytest.raises(UserError, match=r'config: algorithm\.gamma was 1\.0 and is 0\.9; choose') as e:
    train.train_and_evaluate(config, str(tmp_path))
  assert '\n' not in str(e.value)


@pytest.mark.slow
def test_training_lifts_success_on_the_bandit(tmp_path):
  """The arm that the model knows as the better one is the worse: from one right pull in eight to most."""
  config = small_config(
    num_iterations=6,
    train__tags=('Bandit',),
    train__groups=32,
    train__group_size=8,
    envs__Bandit__arms=(('Dragon', 'Phoenix'),),
    envs__Bandit__high_probability=1.0,
    eval__tags=('Bandit',),
    eval__groups=64,
    eval__group_size=4,
    length_step=64,
    eval__temperature=1.0,
    eval__every=0,
    eval__greedy_too=False,
    optimizer__actor_lr=2e-4,
    optimizer__mini_batch_size=64,
    optimizer__micro_batch_size=64,
    checkpoint__every=0,
  )
  last = train.train_and_evaluate(config, str(tmp_path))
  first = read_metrics(tmp_path)[0]
  before, after = first['val-env/Bandit/success'], last['val-env/Bandit/success']
  assert before < 0.3 and after > 0.8  # 256 episodes: the standard error is at most 0.03


@pytest.mark.exhaustive
@pytest.mark.usefixtures('new_programs')
def test_a_run_compiles_a_bounded_number_of_programs(tmp_path):
  config = small_config(
    train__groups=16, train__group_size=4, optimizer__mini_batch_size=32, optimizer__micro_batch_size=16, length_step=64
  )
  policy = build.load_policy(config)
  trainer = build.make_trainer(config, policy)
  state, widths = trainer.init(), set()
  for _ in range(5):
    rollout, selection = trainer.collect(state)
    batch, _ = trainer.estimate(state, selection)
    state, metrics = trainer.update(state, batch, selection)
    widths.add(rollout.trajectory.tokens.shape[1])
    assert metrics['rollout/logprob_gap_max'] < 1e-3
  assert len(widths) > 1
  assert trainer.learner.traces <= 8
  assert policy.sampler.traces['decode'] <= 14


_OUT_OF_MEMORY = """
import sys, jax
from ragen_jax import __main__

def mode(config, workdirs):
  raise jax.errors.JaxRuntimeError(message)

message = sys.argv.pop()
__main__.MODES['train'] = mode, ''
__main__.run()
"""


@pytest.mark.parametrize(
  ('message', 'told'),
  [
    ('RESOURCE_EXHAUSTED: Out of memory while trying to allocate 11.06GiB.\nStack', True),
    ('RESOURCE_EXHAUSTED: No space left on device', False),
  ],
)
def test_a_device_without_memory_is_told_in_one_line(tmp_path, message, told):
  done = copy_python(_OUT_OF_MEMORY, '--config=configs/frozenlake_ppo.py', f'--workdir={tmp_path}', message)
  if told:
    assert done.returncode == 2 and done.stderr.count('\n') == 1, done.stderr[-2000:]
    assert done.stderr.startswith('error: a device ran out of memory (RESOURCE_EXHAUSTED: Out of memory while')
    assert '11.06GiB.)' in done.stderr and 'optimizer.micro_batch_size' in done.stderr
  else:
    assert done.returncode == 1 and 'JaxRuntimeError: RESOURCE_EXHAUSTED: No space' in done.stderr


_COMPILES_AT_THE_END = """
import atexit, sys, threading
from ragen_jax import __main__
from ragen_jax.utils.background import Background

def mode(config, workdirs):
  begun = threading.Event()
  Background(1).want([('a', lambda: (begun.set(), threading.Event().wait()))], urgency=0)
  begun.wait()
  if stopped:
    raise KeyboardInterrupt

atexit.register(print, 'the interpreter ends')
stopped = sys.argv.pop() == 'stopped'
__main__.MODES['train'] = mode, ''
__main__.run()
"""


@pytest.mark.parametrize(('end', 'status'), [('finished', 0), ('stopped', 130)])
def test_the_exit_status_does_not_depend_on_what_is_still_being_compiled(tmp_path, end, status):
  """The interpreter would abort the process if it ended during a compilation, so it does not end itself."""
  arguments = ['--config=configs/frozenlake_ppo.py', f'--workdir={tmp_path}', end]
  done = copy_python(_COMPILES_AT_THE_END, *arguments)
  assert (done.returncode, done.stdout) == (status, ''), done.stderr[-2000:]
