"""A run on disk: what it saves and restores, when it evaluates, stops and rolls back; by hand, and in whole runs."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import signal
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from ragen_jax import build, train
from ragen_jax.agent.episode import Episode, Status, Turn
from ragen_jax.agent.finite import NotFinite
from ragen_jax.agent.rollout import Rollout
from ragen_jax.agent.trajectory import Timeline
from ragen_jax.distributed import processes
from ragen_jax.envs.base import Budget
from ragen_jax.envs.spec import EnvSpec
from ragen_jax.evaluation.evaluator import Evaluation
from ragen_jax.runs import trackers
from ragen_jax.runs.checkpoints import Checkpointer
from ragen_jax.runs.interrupt import Interrupt, Stopped
from ragen_jax.runs.metrics import read_metrics
from ragen_jax.training.curriculum import Curriculum
from ragen_jax.training.monitor import Verdict
from ragen_jax.training.replay import ReplayBuffer, ReplaySettings
from ragen_jax.training.run import Iteration, open_run
from ragen_jax.training.run_lines import diverged, greeting
from ragen_jax.training.state import TrainState
from ragen_jax.training.trainer import Trainer
from ragen_jax.utils.errors import DiskError, Diverged, UserError
from tests.support.configs import small_config
from tests.support.damage import flip_bytes
from tests.support.datasets import make, write_lines

# -- by hand -----------------------------------------------------------------------------------------------------------


def _state(value=0.0, **fields):
  """A state of two numbers."""
  trained = nnx.State({'policy': {'kernel': jnp.full(2, value, jnp.float32)}})
  fields = {'frozen': nnx.State({})} | fields
  return TrainState(trained, opt_state={'mu': jnp.full(2, 10 * value, jnp.float32)}, **fields)


def _rollout():
  timeline = Timeline(1, 4)
  timeline.append_context(0, (5, 6, 7), 0)
  zero = np.zeros(1, np.int32)
  trajectory = timeline.trajectory(group=zero, episode=zero, env=zero, status=zero, policy_version=0, pad_id=0)
  episode = Episode('FrozenLake', 0, 0, [Turn('', '', [], (1.0,), 0.0, True, 0)])
  return Rollout(trajectory, [episode], np.zeros((1, 1), np.int32), np.zeros(1, np.float32), 0, 0)


def _evaluation(success):
  return Evaluation({'val-env/FrozenLake/success': success}, [], [])


@contextlib.contextmanager
def _open(workdir, state=None, replay=None, curriculum=None, **fields):
  config = small_config(**{'num_iterations': 6, 'eval__every': 2, 'checkpoint__every': 2} | fields)
  settings, monitor = build.run_settings(config), build.make_monitor(config)
  replay = replay or ReplayBuffer(ReplaySettings(groups=0, max_age=1))
  opened = open_run(settings, str(workdir), 'a model', state or _state(), replay, monitor, Interrupt(), curriculum)
  with opened as (run, state):
    yield run, state


class _Batch:
  advantages, trained = np.zeros((1, 1), np.float32), np.zeros((1, 1), bool)


def _iteration(metrics=None, fresh=True, groups=1, found=None):
  selection = types.SimpleNamespace(groups=groups)
  return Iteration(_rollout(), selection, _Batch(), fresh, metrics or {}, lambda: found or {})


def _finish(run, state, evaluation=None, verdict=None, found=None):
  with run.timer('step'):
    pass
  """The state to continue from, and whether it is an earlier one."""
  after = run.finish_iteration(state, _iteration(found=found), evaluation, verdict or Verdict())
  return after, after is not state


def _steps(workdir):
  return sorted(int(p.name) for p in (workdir / 'checkpoints').iterdir() if p.name.isdigit())


def test_a_run_saves_on_schedule_and_goes_on_from_the_last_checkpoint(tmp_path):
  with _open(tmp_path) as (run, state):
    assert state.iteration == 0 and run.goes_on(state)
    for i in range(1, 4):
      state, rolled_back = _finish(run, _state(i, iteration=i))
      assert not rolled_back
  assert _steps(tmp_path) == [2]
  fresh = _state(9.0)
  with _open(tmp_path, fresh) as (run, state):
    assert state.iteration == 2 and run.goes_on(state) and state.lr_scale == 1.0
    np.testing.assert_array_equal(state.trained['policy']['kernel'], [2, 2])
    np.testing.assert_array_equal(state.opt_state['mu'], [20, 20])
  assert all(x.is_deleted() for x in jax.tree.leaves(fresh.saved()))  # they would lie beside the restored ones
  assert [line['step'] for line in read_metrics(tmp_path)] == [1, 2]  # and the third iteration is forgotten


def test_the_tracker_of_a_run_is_the_one_of_the_config_and_gets_the_metrics_of_each_iteration(tmp_path, monkeypatch):
  told = []
  target = types.SimpleNamespace(id='i', scalars=lambda *x: told.append(x), close=lambda: told.append('closed'))
  monkeypatch.setitem(trackers._OPEN, 'mlflow', lambda *x: told.append(x) or target)
  with _open(tmp_path, logging__tracker='mlflow', logging__project='games') as (run, _):
    for i in range(1, 3):
      _finish(run, _state(i, iteration=i))
  (project, workdir, name, config), *rows, end = told
  assert (project, workdir, name, config['logging.project'], end) == ('games', tmp_path, '', 'games', 'closed')
  assert [{'step': step} | row for step, row in rows] == read_metrics(tmp_path)


def test_evaluations_are_due_on_schedule_at_the_end_and_when_the_run_stops(tmp_path):
  with _open(tmp_path, num_iterations=5) as (run, _):
    due = [run.evaluation_due(_state(iteration=i), Verdict()) for i in range(1, 6)]
    assert due == [False, True, False, True, True]
    assert run.evaluation_due(_state(iteration=1), Verdict('stop', 'why'))
    assert [run.goes_on(_state(iteration=i)) for i in (4, 5)] == [True, False]


def test_a_rollback_gives_the_best_checkpoint_smaller_steps_and_an_empty_buffer(tmp_path, capsys):
  with _open(tmp_path, monitor__rollback_lr=0.5) as (run, _):
    assert (
      _finish(run, _state(1, iteration=1), verdict=Verdict('rollback', 'sick'))[1] is False
    )  # nothing to go back to
    _finish(run, _state(2, iteration=2), _evaluation(0.9))
    _finish(run, _state(4, iteration=4), _evaluation(0.3))
    discarded = _state(5, iteration=5)
    state, rolled_back = _finish(run, discarded, verdict=Verdict('rollback', 'sick'))
    assert rolled_back and (state.iteration, state.lr_scale) == (5, 0.5) and run.goes_on(state)
    assert all(x.is_deleted() for x in jax.tree.leaves(discarded.saved()))
    np.testing.assert_array_equal(state.trained['policy']['kernel'], [2, 2])
    np.testing.assert_array_equal(state.opt_state['mu'], [20, 20])
    # Not at the end: the last iteration is kept as it is.
    assert not _finish(run, state.replace(iteration=6), verdict=Verdict('rollback', 'sick'))[1]
  told = capsys.readouterr().err
  assert 'iteration 1: sick; there is no evaluated checkpoint to roll back to' in told
  assert 'iteration 5: sick; back to 2, learning rate x 0.5' in told
  with _open(tmp_path) as (_, state):
    assert state.lr_scale == 0.5 and state.iteration == 6


def test_a_curriculum_is_saved_restored_and_rolled_back_with_the_weights(tmp_path):
  env = make(path=write_lines(tmp_path / 'q.jsonl', [{'question': str(i), 'answer': 'a'} for i in range(9)]))
  settings = build.curriculum_settings(small_config(curriculum__order='success'))

  def fresh(env=env):
    return Curriculum(settings, [EnvSpec('Quiz', env, Budget(1, 1, 1), 20, 2)])

  def note(iteration):
    curriculum.record([Episode('Quiz', 0, iteration, [], status=Status.SUCCESS)], iteration)
    return jax.tree.map(np.copy, curriculum.state()[0])

  curriculum = fresh()
  with _open(tmp_path / 'run', curriculum=curriculum) as (run, _):
    kept = note(2)
    _finish(run, _state(2, iteration=2), _evaluation(0.9))
    last = note(4)
    _finish(run, _state(4, iteration=4), _evaluation(0.3))
    note(5)
  curriculum = fresh()
  with _open(tmp_path / 'run', curriculum=curriculum) as (run, state):
    jax.tree.map(np.testing.assert_array_equal, curriculum.state()[0], last)
    assert (curriculum.state()[0]['Quiz']['last'] >= 0).sum() == 2
    note(5)
    assert _finish(run, state.replace(iteration=5), verdict=Verdict('rollback', 'sick'))[1]
    jax.tree.map(np.testing.assert_array_equal, curriculum.state()[0], kept)
  other = make(path=write_lines(tmp_path / 'p.jsonl', [{'question': 'new', 'answer': 'a'}]))
  with (
    pytest.raises(
      UserError,
      match=r'^checkpoint of step \d+ in .*envs\.Quiz: its curriculum is of 9 other questions, or difficulties, than',
    ),
    _open(tmp_path / 'run', curriculum=fresh(other)),
  ):
    pass


def test_rollbacks_make_the_steps_smaller_each_time(tmp_path):
  with _open(tmp_path, monitor__rollback_lr=0.5, checkpoint__every=1) as (run, _):
    state, _ = _finish(run, _state(1, iteration=1), _evaluation(0.5))
    for i, scale in ((2, 0.5), (3, 0.25), (4, 0.125)):
      state, rolled_back = _finish(run, state.replace(iteration=i), verdict=Verdict('rollback', 'sick'))
      assert rolled_back and state.lr_scale == scale
  with _open(tmp_path, monitor__rollback_lr=0.5, checkpoint__every=1) as (_, resumed):
    assert resumed.lr_scale == 0.125


def test_a_rollback_goes_to_the_same_checkpoint_whether_the_run_was_interrupted_or_not(tmp_path):
  fields = {'num_iterations': 20, 'checkpoint__every': 4}
  successes = {2: 0.1, 4: 0.2, 6: 0.9, 8: 0.3}

  def play(run, start, signal_at=None):
    state = None
    for i in range(start, 10):
      if i == signal_at:
        os.kill(os.getpid(), signal.SIGTERM)
      evaluation = _evaluation(successes[i]) if i in successes else None
      state, rolled_back = _finish(run, _state(i, iteration=i), evaluation, Verdict('rollback' if i == 9 else 'go_on'))
    assert rolled_back
    return state.trained['policy']['kernel'][0]

  with _open(tmp_path / 'whole', **fields) as (run, _):
    assert play(run, 1) == 8
  with pytest.raises(Stopped), _open(tmp_path / 'interrupted', **fields) as (run, _):
    play(run, 1, signal_at=6)
  assert _steps(tmp_path / 'interrupted') == [4, 6]
  with _open(tmp_path / 'interrupted', **fields) as (run, state):
    assert play(run, state.iteration + 1) == 8  # not 6, which only the interrupted run has


def test_a_rollback_takes_the_next_best_checkpoint_if_the_best_one_is_damaged(tmp_path, capsys, caplog):
  fields = {'num_iterations': 20, 'checkpoint__every': 2, 'checkpoint__keep': 3}
  with _open(tmp_path, **fields) as (run, _):
    for i, success in ((2, 0.5), (4, 0.9), (6, 0.1)):
      _finish(run, _state(i, iteration=i), _evaluation(success))
    flip_bytes(tmp_path, 4)
    state, rolled_back = _finish(run, _state(7, iteration=7), verdict=Verdict('rollback', 'sick'))
    assert rolled_back and state.trained['policy']['kernel'][0] == 2
    for step in (2, 6):
      flip_bytes(tmp_path, step)
    state, rolled_back = _finish(run, _state(8, iteration=8), verdict=Verdict('rollback', 'sick again'))
    assert not rolled_back and state.trained['policy']['kernel'][0] == 8  # and the run goes on
    assert _steps(tmp_path) == [8]
  told = capsys.readouterr().err
  assert 'iteration 7: sick; back to 2' in told and 'iteration 8: sick again; there is no evaluated checkpoint' in told
  assert 'checkpoint of step 4 is damaged' in caplog.text
  assert sorted(p.name for p in (tmp_path / 'damaged_checkpoints').iterdir()) == ['2', '4', '6']


def test_a_run_that_is_killed_after_a_checkpoint_has_the_times_of_its_iteration(tmp_path):
  with _open(tmp_path) as (run, _):
    _finish(run, _state(2, iteration=2))
    left = read_metrics(tmp_path)  # what SIGKILL would leave now
  assert {'timing_s/step', 'timing_s/save_checkpoint', 'perf/throughput'} <= set(left[-1])


def test_a_stopped_run_is_saved_and_stays_stopped(tmp_path):
  with _open(tmp_path) as (run, _):
    state, _ = _finish(run, _state(1, iteration=1), _evaluation(0.5), Verdict('stop', 'flat'))
    assert not run.goes_on(state)
  assert _steps(tmp_path) == [1]
  with _open(tmp_path) as (run, state):
    assert state.iteration == 1 and not run.goes_on(state)


_BAD = Verdict('bad', '3 of 9 sampled log-probs (row 2)')


def test_bad_iterations_are_named_and_not_saved_and_end_the_run_when_there_are_too_many(tmp_path, capsys):
  with pytest.raises(Diverged) as e, _open(tmp_path, checkpoint__every=1, num_iterations=9) as (run, _):
    _finish(run, _state(1, iteration=1))
    for i in (2, 3):
      _finish(run, _state(i, iteration=i), _evaluation(0.9), _BAD)
    _finish(run, _state(4, iteration=4))  # two in a row are not three
    for i in (5, 6):
      assert run.goes_on(_finish(run, _state(i, iteration=i), _evaluation(0.9), _BAD)[0])
    _finish(run, _state(7, iteration=7), None, _BAD)
  assert _steps(tmp_path) == [1, 4]
  assert str(e.value) == diverged(5, 7, _BAD.reason, 4) and '\n' not in str(e.value)
  assert (e.value.status, e.value.everywhere) == (1, True)
  lines = [line for line in capsys.readouterr().err.splitlines() if 'not finite' in line]
  assert [int(line.split()[1].rstrip(':')) for line in lines] == [2, 3, 5, 6, 7]
  assert lines[0] == (
    'iteration 2: not finite: 3 of 9 sampled log-probs (row 2); '
    'bad optimiser steps are skipped, and no checkpoint is saved'
  )


def test_a_run_that_ends_with_a_bad_iteration_has_failed(tmp_path):
  with pytest.raises(Diverged, match=r'^iteration 6: .*; there is no checkpoint; try'), _open(tmp_path) as (run, _):
    _finish(run, _state(6, iteration=6), _evaluation(0.9), _BAD)
  assert not list(tmp_path.glob('checkpoints/*'))


@pytest.mark.parametrize('by', ['evaluation', 'weights'])
def test_an_evaluation_or_new_weights_can_make_an_iteration_bad(tmp_path, capsys, by):
  evaluation = _evaluation(0.9)
  found = {'not_finite/new_weights': NotFinite(1, 'actor/pg_loss under the new weights')}
  if by == 'evaluation':
    evaluation, found = dataclasses.replace(evaluation, not_finite='7 of 9 sampled log-probs (row 0)'), None
  with _open(tmp_path) as (run, _):
    _finish(
      run, _state(1, iteration=1), found={'not_finite/new_weights': NotFinite(1, 'not asked')}
    )  # nothing is saved
    _finish(run, _state(2, iteration=2), evaluation, found=found)
    assert not list(tmp_path.glob('checkpoints/*'))
    _finish(run, _state(4, iteration=4), _evaluation(0.1))
  assert _steps(tmp_path) == [4]
  what = 'actor/pg_loss under the new weights' if found else 'in the evaluation 7 of 9 sampled log-probs (row 0)'
  assert f'iteration 2: not finite: {what}; bad optimiser steps are skipped' in capsys.readouterr().err


def test_bad_iterations_lead_back_to_the_best_checkpoint_if_the_echo_trap_does(tmp_path, capsys):
  fields = {'monitor__echo_trap': 'rollback', 'monitor__max_bad_iterations': 1, 'monitor__max_rollbacks': 1}
  with (
    pytest.raises(Diverged, match=r'^iteration 5: .*start another run from checkpoint 4'),
    _open(tmp_path, **fields) as (run, _),
  ):
    with pytest.raises(Diverged):  # there is no checkpoint yet
      _finish(run, _state(1, iteration=1), None, _BAD)
    _finish(run, _state(2, iteration=2), _evaluation(0.9))
    state, rolled_back = _finish(run, _state(3, iteration=3), None, _BAD)
    assert rolled_back and (state.iteration, state.lr_scale) == (3, 0.5)
    np.testing.assert_array_equal(state.trained['policy']['kernel'], [2, 2])
    _finish(run, state.replace(iteration=4))
    _finish(run, state.replace(iteration=5), None, _BAD)  # the second rollback is one too many
  assert 'iteration 3: not finite: 3 of 9 sampled log-probs (row 2); back to 2' in capsys.readouterr().err


def test_a_bad_iteration_is_no_iteration_without_groups_and_its_numbers_enter_no_average(tmp_path):
  numbers = {
    'rollout/in_group_reward_std': 0.5, 'rollout/repeated_replies': 0.0, 'train/FrozenLake/success': 0.5,
    'critic/score/mean': 0.5, 'not_finite/sampled_logprobs': NotFinite(3, '3 of 9 sampled log-probs (row 2)'),
  }  # fmt: skip
  with _open(tmp_path, monitor__empty_patience=1) as (run, _):
    verdict = run.log_iteration(_state(iteration=1), _iteration(numbers, groups=0))
    assert verdict == _BAD
    _finish(run, _state(iteration=2), None, verdict)
  (first, _) = read_metrics(tmp_path)
  assert first['not_finite/sampled_logprobs'] == 3 and 'critic/score/mean_ema' not in first


def test_spikes_are_written_in_one_line_and_as_metrics(tmp_path, capsys):
  """Also in iterations that reuse a rollout; and not in bad ones, whose numbers enter no median."""

  with _open(tmp_path, monitor__baseline_steps=3, num_iterations=9) as (run, _):
    for i, norm in enumerate((1.0, 1.0, 2.0, 1e9, 30.0, 40.0), start=1):
      found = {'actor/grad_norm': norm}
      if i == 4:
        found['train/skipped_steps'] = NotFinite(1, 'the loss')
      verdict = run.log_iteration(_state(iteration=i), _iteration(found, fresh=False))
      _finish(run, _state(iteration=i), None, verdict)
  told = [line for line in capsys.readouterr().err.splitlines() if 'times its usual' in line]
  assert told == ['iteration 5: actor/grad_norm is 30, 30.0 times its usual 1 (monitor.spike_factor)']
  lines = read_metrics(tmp_path)
  assert [line.get('monitor/grad_norm_spike') for line in lines] == [0, 0, 0, None, 1, 1]
  assert [line['train/bad_iterations'] for line in lines] == [0, 0, 0, 1, 1, 1]


def test_the_first_evaluation_can_be_read_while_the_first_iteration_runs(tmp_path):
  with _open(tmp_path) as (run, _):
    run.log_first_evaluation(_evaluation(0.25))
    (line,) = read_metrics(tmp_path)
    assert line['step'] == 0 and line['val-env/FrozenLake/success'] == 0.25
    _finish(run, _state(iteration=1))
  assert [line['step'] for line in read_metrics(tmp_path)] == [0, 1]


@pytest.mark.parametrize('tags', [('FrozenLake', 'Bandit'), ('Bandit',)])
def test_invalid_replies_of_the_first_evaluation_are_told_of_what_is_trained(tmp_path, caplog, tags):
  turn = Turn('', 'nothing', [], (0.0,), 0.0, False, 0)
  episodes = [Episode(tag, 0, 0, [turn] * 2, status=Status.OUT_OF_TURNS) for tag in tags]
  evaluation = Evaluation({f'val-env/{tag}/success': 0.0 for tag in tags}, episodes, [])
  with _open(tmp_path, train__tags=('FrozenLake',), eval__tags=tags) as (run, _):
    run.log_first_evaluation(evaluation)
  told = [m.split()[2] for m in caplog.messages if 'first replies are not valid' in m]
  assert told == [f'{tags[0]}:']


def test_a_model_whose_numbers_are_not_finite_is_refused_before_training(tmp_path):
  evaluation = dataclasses.replace(_evaluation(0.0), not_finite='9 of 9 sampled log-probs (row 0)')
  with (
    pytest.raises(Diverged, match=r'^iteration 0: not finite: in the evaluation 9 of 9 sampled .*model\.path') as e,
    _open(tmp_path) as (run, _),
  ):
    run.log_first_evaluation(evaluation)
  assert '\n' not in str(e.value) and not list(tmp_path.glob('checkpoints/*'))
  assert read_metrics(tmp_path)[0]['step'] == 0


@pytest.mark.parametrize('first', [2, 3])
def test_a_signal_ends_the_run_and_saves_where_a_rollout_is_over(tmp_path, request, first):
  before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
  request.addfinalizer(lambda: signal.signal(signal.SIGTERM, before))
  with pytest.raises(Stopped) as stopped, _open(tmp_path, train__online_k=2, checkpoint__every=0) as (run, _):
    os.kill(os.getpid(), signal.SIGTERM)
    for step in range(first, 6):
      assert step == first or step == first + 1 == 4
      _finish(run, _state(step, iteration=step))
  assert stopped.value.status == 143 and _steps(tmp_path) == [first + first % 2]
  with _open(tmp_path, train__online_k=2, checkpoint__every=0) as (_, state):
    np.testing.assert_array_equal(state.trained['policy']['kernel'], [first + first % 2] * 2)


def test_an_interrupted_run_ends_with_the_checkpoints_of_an_uninterrupted_one(tmp_path, request):
  before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
  request.addfinalizer(lambda: signal.signal(signal.SIGTERM, before))

  def steps_after(signals):
    seen, done = [], 0
    for at in (*signals, None):
      with contextlib.suppress(Stopped), _open(tmp_path / str(signals), num_iterations=8) as (run, state):
        assert state.iteration == done
        while run.goes_on(state):
          done = state.iteration + 1
          if done == at:
            os.kill(os.getpid(), signal.SIGTERM)
          state, _ = _finish(run, _state(done, iteration=done))
      seen.append(_steps(tmp_path / str(signals)))
    return seen

  assert steps_after(()) == [[6, 8]]
  assert steps_after((5,)) == [[2, 4, 5], [6, 8]]
  assert steps_after((1, 3, 5, 7)) == [[1], [2, 3], [2, 4, 5], [4, 6, 7], [6, 8]]


def test_a_signal_ends_a_run_that_goes_back_within_a_rollout(tmp_path, request):
  before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
  request.addfinalizer(lambda: signal.signal(signal.SIGTERM, before))
  with pytest.raises(Stopped), _open(tmp_path, train__online_k=2) as (run, _):
    _finish(run, _state(2, iteration=2), _evaluation(0.9))
    os.kill(os.getpid(), signal.SIGTERM)
    _finish(run, _state(3, iteration=3), verdict=Verdict('rollback', 'sick'))
  assert _steps(tmp_path) == [2]


def test_a_signal_after_a_bad_iteration_within_a_rollout_ends_the_run_at_once(tmp_path, request):
  before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
  request.addfinalizer(lambda: signal.signal(signal.SIGTERM, before))
  with pytest.raises(Stopped), _open(tmp_path, train__online_k=2, checkpoint__every=0) as (run, _):
    os.kill(os.getpid(), signal.SIGTERM)
    _finish(run, _state(3, iteration=3), verdict=Verdict('bad', 'x'))
  assert not list(tmp_path.glob('checkpoints/*'))


@pytest.mark.parametrize(
  ('done', 'found', 'saved'), [(0, {}, []), (2, {}, [2]), (3, {}, [2, 3]), (3, {'x': NotFinite(1, 'x')}, [2])]
)
def test_a_stop_in_a_rollout_saves_the_state_before_it(tmp_path, monkeypatch, done, found, saved):
  with pytest.raises(Stopped), _open(tmp_path, eval__every=0) as (run, state):
    for i in range(1, done + 1):
      state, _ = _finish(run, _state(i, iteration=i), found=found if i % 2 else {})
    with run.saved_if_stopped(state):
      raise Stopped(signal.SIGTERM)
  assert (_steps(tmp_path) if saved else list(tmp_path.glob('checkpoints/*'))) == saved
  with _open(tmp_path, eval__every=0) as (run, state):
    assert state.iteration == (saved or [0])[-1]


@pytest.mark.parametrize(('by_all', 'saved'), [(True, [2]), (False, [])])
def test_an_error_that_ends_a_run_saves_the_state_before_it(tmp_path, monkeypatch, by_all, saved):
  error = UserError('no task is played any more')
  monkeypatch.setattr(processes, 'raised_by_all', lambda e: e is error and by_all)
  contexts = (
    lambda run, state: run.saved_if_stopped(state),
    lambda run, state: run.saved_if_evaluation_stopped(state, Verdict(), run._try_weights),
  )
  for number, context in enumerate(contexts):
    workdir = tmp_path / str(number)
    with pytest.raises(UserError) as raised, _open(workdir, checkpoint__every=0, eval__every=0) as (run, _):
      state, _ = _finish(run, _state(2, iteration=2))
      tried = []
      run._try_weights = lambda tried=tried: tried.append(1) or {}
      with context(run, state):
        raise error
    assert raised.value is error and bool(tried) == by_all
    assert (_steps(workdir) if saved else list(workdir.glob('checkpoints/*'))) == saved


def test_a_run_that_an_error_ends_tells_that_error_if_it_cannot_be_saved(tmp_path, monkeypatch, caplog):
  stall = UserError('no task is played any more')
  full = DiskError('checkpoints: the disk is full')

  def save(*args, **kwargs):
    raise full

  for error, told in ((stall, stall), (Stopped(signal.SIGTERM), full)):
    with pytest.raises(type(told)) as raised, _open(tmp_path, checkpoint__every=0, eval__every=0) as (run, _):
      state, _ = _finish(run, _state(2, iteration=2))
      monkeypatch.setattr(run._checkpointer, 'save', save)
      with run.saved_if_stopped(state):
        raise error
    assert raised.value is told
  assert [r.getMessage() for r in caplog.records if r.levelname == 'WARNING'] == [
    'no checkpoint of iteration 2: checkpoints: the disk is full'
  ]


@pytest.mark.parametrize('every', [0, 2])
def test_an_evaluation_that_is_stopped_is_done_when_the_run_resumes(tmp_path, every):
  with pytest.raises(Stopped), _open(tmp_path, checkpoint__every=every) as (run, _):
    with run.timer('step'):
      pass
    with run.saved_if_evaluation_stopped(_state(2, iteration=2), Verdict(), dict):
      raise Stopped(signal.SIGTERM)
  for again in (False, True):  # the second time the score is in the checkpoint, if this is on schedule
    with _open(tmp_path, checkpoint__every=every) as (run, state):
      assert state.iteration == 2 and run.unevaluated == (Verdict() if not (every and again) else None)
      if run.unevaluated:
        state = run.finish_evaluation(state, _evaluation(0.5))
      assert run.unevaluated is None and run._checkpointer.best_step() == (2 if every else None)
  assert _steps(tmp_path) == [2] and state.params['policy']['kernel'][0] == 2
  assert [row['val-env/success'] for row in read_metrics(tmp_path) if row['step'] == 2] == [0.5]


def test_a_checkpoint_of_another_config_is_refused_with_the_difference(tmp_path):
  with _open(tmp_path / 'one', checkpoint__every=1) as (run, _):
    _finish(run, _state(1, iteration=1))
  for name in ('two', 'three'):  # without config.json, as after a copy
    shutil.copytree(tmp_path / 'one' / 'checkpoints', tmp_path / name / 'checkpoints')
  changes = {'seed': 1, 'optimizer__b1': 0.5, 'optimizer__final_lr_fraction': 0.5, 'logging__episodes': 1}
  message = (
    r'^checkpoint of step 1 in .*two/checkpoints belongs to another config: optimizer.b1 was 0.9 and is 0.5; '
    r'optimizer.final_lr_fraction was 1.0 and is 0.5; seed was 0 and is 1; choose another --workdir or set'
  )
  with pytest.raises(UserError, match=message), _open(tmp_path / 'two', **changes):
    pass
  with _open(tmp_path / 'three', num_iterations=9, logging__episodes=1, checkpoint__every=3) as (_, state):
    assert state.iteration == 1  # fields that may change


def test_a_run_does_not_go_on_with_other_data_than_its_own(tmp_path):
  data = tmp_path / 'data.jsonl'
  fields = {'envs__Dataset__path': str(data), 'train__tags': ('Dataset',), 'checkpoint__every': 1}
  write_lines(data, [{'question': 'a', 'answer': 'b'}])
  with _open(tmp_path / 'run', **fields) as (run, state):
    _finish(run, state.replace(iteration=1))
  with _open(tmp_path / 'run', **fields) as (_, state):
    assert state.iteration == 1
  write_lines(data, [{'question': 'a', 'answer': 'c'}])
  message = (
    r'^--workdir=.*/run: the files of envs\.Dataset\.path are not those of the run so far, .* another --workdir$'
  )
  with pytest.raises(UserError, match=message), _open(tmp_path / 'run', **fields):
    pass


@pytest.mark.parametrize('part', ['frozen', 'reference'])
def test_a_run_does_not_go_on_with_other_weights_than_its_own_where_checkpoints_have_none(tmp_path, part):
  def state(value, dtype=jnp.float32):
    return _state(**{part: nnx.State({'policy': {'kernel': jnp.full(2, value, dtype)}})})

  with _open(tmp_path, state(0.5), checkpoint__every=1) as (run, now):
    _finish(run, now.replace(iteration=1))
  message = f'^--workdir={tmp_path}: the {part} weights of the model .* are not those that it was trained with, .*'
  with pytest.raises(UserError, match=message) as e, _open(tmp_path, state(0.25)):
    pass
  assert '\n' not in str(e.value)
  for same in (state(0.5), state(0.25, jnp.bfloat16)):  # those of another type cannot be compared
    with _open(tmp_path, same) as (_, restored):
      assert restored.iteration == 1


def test_a_checkpoint_whose_evaluation_is_bad_is_not_recommended(tmp_path):
  with _open(tmp_path) as (run, _):
    _finish(run, _state(4, iteration=4))
  state = _state(6, iteration=6)
  with pytest.raises(Stopped), _open(tmp_path) as (run, _), run.saved_if_evaluation_stopped(state, Verdict(), dict):
    raise Stopped(signal.SIGTERM)
  assert _steps(tmp_path) == [4, 6]
  with pytest.raises(Diverged, match='start another run from checkpoint 4;'), _open(tmp_path) as (run, state):
    run.finish_evaluation(state, dataclasses.replace(_evaluation(0.0), not_finite='9 of 9 sampled log-probs'))


def test_the_verdict_of_an_iteration_whose_evaluation_was_stopped_is_carried_out(tmp_path):
  stop, back = Verdict('stop', 'flat'), Verdict('rollback', 'collapse')
  with pytest.raises(Stopped), _open(tmp_path) as (run, _):
    state, _ = _finish(run, _state(2, iteration=2), _evaluation(0.5))
    with run.saved_if_evaluation_stopped(_state(4, iteration=4), back, dict):
      raise Stopped(signal.SIGTERM)
  for _ in range(2):  # the weights of step 4 are not replaced, so the same is done again
    with _open(tmp_path) as (run, state):
      assert run.unevaluated == back
      state = run.finish_evaluation(state, _evaluation(0.1))
      assert (state.iteration, state.params['policy']['kernel'][0]) == (4, 2) and state.lr_scale < 1
  with pytest.raises(Stopped), _open(tmp_path) as (run, state):
    run.finish_evaluation(state, _evaluation(0.1))
    with run.saved_if_evaluation_stopped(_state(5, iteration=5), stop, dict):
      raise Stopped(signal.SIGTERM)
  with _open(tmp_path) as (run, state):
    run.finish_evaluation(state, _evaluation(0.1))
  with _open(tmp_path) as (run, state):
    assert run.unevaluated is None and state.iteration == 5 and not run.goes_on(state)


@pytest.mark.parametrize(
  ('fields', 'verdict', 'found'),
  [({'train__online_k': 2}, Verdict(), {}), ({}, _BAD, {}), ({}, Verdict(), {'x': NotFinite(1, 'x')})],
)
def test_a_stop_in_an_evaluation_saves_no_state_that_cannot_be_resumed(tmp_path, fields, verdict, found):
  with (
    pytest.raises(Stopped),
    _open(tmp_path, **fields) as (run, _),
    run.saved_if_evaluation_stopped(_state(1, iteration=1), verdict, lambda: found),
  ):
    raise Stopped(signal.SIGINT)
  assert not list(tmp_path.glob('checkpoints/*'))


def test_a_stop_after_a_bad_iteration_saves_nothing(tmp_path):
  with pytest.raises(Stopped), _open(tmp_path) as (run, _):
    state, _ = _finish(run, _state(1, iteration=1), verdict=_BAD)
    with run.saved_if_stopped(state):
      raise Stopped(signal.SIGINT)
  assert not list(tmp_path.glob('checkpoints/*'))


def test_checkpoints_of_a_warm_start_are_refused(tmp_path):
  with Checkpointer(tmp_path, keep=2) as checkpointer:
    checkpointer.save(1, _state().saved(), {'data': 7})
  message = r'its checkpoints belong to a warm start; choose another --workdir'
  with pytest.raises(UserError, match=message), _open(tmp_path):
    pass


def test_the_first_line_says_where_a_run_stands():
  assert greeting('w', 'tiny: small', 0, 9, '', unevaluated=False) == 'model tiny: small; the run is saved in w'
  assert greeting('w', '', 3, 9, '', unevaluated=False) == 'resuming w after iteration 3'
  assert greeting('w', '', 9, 9, '', unevaluated=True) == 'resuming w with the evaluation after iteration 9'
  assert greeting('w', '', 9, 9, '', unevaluated=False) == 'w is finished: 9 iterations'
  assert greeting('w', '', 3, 9, 'flat', unevaluated=True) == 'w was stopped after iteration 3: flat'


# -- whole runs --------------------------------------------------------------------------------------------------------


def _sick(monkeypatch, when):
  """Makes the metrics of a real run look like a collapse from iteration `when` on."""
  healthy = Trainer.rollout_metrics
  seen = []

  def rollout_metrics(self, rollout):
    metrics = healthy(self, rollout)
    seen.append(1)
    sick = {'rollout/in_group_reward_std': 0.0, 'rollout/repeated_replies': 1.0}
    return metrics | (
      sick if len(seen) > when else {'rollout/in_group_reward_std': 0.5, 'rollout/repeated_replies': 0.0}
    )

  monkeypatch.setattr(Trainer, 'rollout_metrics', rollout_metrics)


@pytest.mark.slow
def test_a_bad_rollout_is_not_used_again(tmp_path, monkeypatch, capsys):
  """So it counts as one bad iteration, and not as `train.online_k` of them."""
  play, played = Trainer.rollout, []

  def rollout(self, state, attempt=0):
    found = play(self, state, attempt)
    if not played:
      found.trajectory.rewards[found.trajectory.loss_mask] = np.nan
    played.append(state.iteration)
    return found

  monkeypatch.setattr(Trainer, 'rollout', rollout)
  config = small_config(
    num_iterations=3, train__online_k=3, monitor__max_bad_iterations=2, checkpoint__every=3, eval__every=0,
    eval__greedy_too=False, eval__groups=4,
  )  # fmt: skip
  train.train_and_evaluate(config, str(tmp_path))
  assert played == [0, 1]  # the third iteration learns from the second rollout, which was good
  lines = read_metrics(tmp_path)[1:]
  assert ['not_finite/rewards' in line for line in lines] == [True, False, False]
  assert [line['train/num_mini_batches'] for line in lines] == [0, 2, 2]
  assert [line.get('rollout/policy_lag_max') for line in lines] == [None, 0, 1]
  assert capsys.readouterr().err.count(': not finite: ') == 1 and _steps(tmp_path) == [3]


def _run_config(action):
  return small_config(
    num_iterations=6, eval__every=2, eval__greedy_too=False, eval__groups=4, monitor__echo_trap=action,
    monitor__baseline_steps=2, monitor__patience=1, monitor__ema_decay=0.0, checkpoint__every=2,
  )  # fmt: skip


@pytest.mark.slow
def test_a_run_that_stops_is_evaluated_saved_and_stays_stopped(tmp_path, monkeypatch, capsys):
  _sick(monkeypatch, when=2)
  train.train_and_evaluate(_run_config('stop'), str(tmp_path))
  lines = read_metrics(tmp_path)
  assert [line['step'] for line in lines] == [0, 1, 2, 3]
  assert 'val-env/success' in lines[-1] and lines[-1]['echo_trap/warning'] == 1
  assert 'the Echo Trap shows in reward_std, repeats; the run ends here' in capsys.readouterr().err
  before = (tmp_path / 'metrics.jsonl').read_text()
  train.train_and_evaluate(_run_config('stop'), str(tmp_path))
  assert (tmp_path / 'metrics.jsonl').read_text() == before


@pytest.mark.slow
def test_a_rollback_goes_on_from_the_best_checkpoint_with_a_smaller_step(tmp_path, monkeypatch, capsys):
  _sick(monkeypatch, when=2)
  updated = []
  update = Trainer.update

  def spy(self, state, *rest):
    updated.append(np.array(state.params['policy']['embed_tokens'][...]))
    return update(self, state, *rest)

  monkeypatch.setattr(Trainer, 'update', spy)
  train.train_and_evaluate(_run_config('rollback'), str(tmp_path))
  lines = read_metrics(tmp_path)
  assert [line.get('train/lr_scale') for line in lines] == [None, 1.0, 1.0, 1.0, 0.5, 0.5, 0.5]
  # Iteration 3 collapsed: the fourth update begins, as the third did, with the weights of step 2.
  np.testing.assert_array_equal(updated[3], updated[2])
  assert (updated[4] != updated[3]).any()
  assert 'back to 2, learning rate x 0.5' in capsys.readouterr().err
