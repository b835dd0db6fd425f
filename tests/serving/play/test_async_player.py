"""Agents play while the trainer learns: versions of tokens, the bound of their age, restarts; with the real engine."""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import threading

import jax
import numpy as np
import pytest

from ragen_jax import build, build_agents
from ragen_jax.agent.episode import Status
from ragen_jax.agent.language_model import param_state
from ragen_jax.runs.interrupt import Interrupt, Stopped
from ragen_jax.sampling.sampler import Sampler, Sampling
from ragen_jax.serving.client import Over, ServerError
from ragen_jax.serving.play import agent_player, async_player, env_program, pool
from ragen_jax.serving.play.agent_player import AgentPlayer
from ragen_jax.serving.play.async_player import METRICS, AsyncAgentPlayer
from ragen_jax.serving.play.runners import FunctionRunner
from ragen_jax.serving.rollouts.tables import Tables
from ragen_jax.serving.types import AttemptState, RolloutState
from ragen_jax.training.rollout_metrics import rollout_metrics
from ragen_jax.training.selection import has_replies
from ragen_jax.utils.errors import UserError
from tests.support.configs import small_config
from tests.support.serving import PATIENCE, Gate, forward, until

pytest.importorskip('starlette')
pytest.importorskip('uvicorn')

SAMPLING = Sampling(0.7, 1.0, 0)
FIRST, KEY = 90_000, jax.random.key(5)
PROMPT = list(range(300, 310))


def async_config(**changes):
  given = dict(
    num_iterations=4, train__tags=('Agent',), eval__tags=('Agent',), train__groups=1, train__group_size=1,
    eval__groups=1, eval__group_size=1, train__temperature=0.7, serve__port=0, serve__slots=2,
    serve__max_concurrency=4, serve__max_staleness=1, serve__max_attempts=1, algorithm__old_logprobs='trainer',
    algorithm__tis_cap=2.0, optimizer__mini_batch_size=1, optimizer__micro_batch_size=1, agent__max_context=96,
    agent__max_response_tokens=32, agent__decode_chunk=4, envs__Agent__runner='a program of the test',
  )  # fmt: skip
  return small_config(**given | changes)


@pytest.fixture(scope='module')
def policy():
  """The built-in model, whose replies have no stop token, so that they end with their budgets."""
  loaded = build.load_policy(async_config())
  vocabulary = loaded.model.policy.cfg.vocab_size
  sampler = Sampler(loaded.model, stop_ids=(vocabulary,), vocab_limit=min(loaded.tokenizer.size, vocabulary))
  return dataclasses.replace(loaded, sampler=sampler)


def weights(policy, version):
  """The weights after so many updates: each moves all of them a little."""
  return jax.tree.map(lambda x: x * (1 + 0.03 * version) if x.ndim > 1 else x, param_state(policy.model))


@contextlib.contextmanager
def opened(monkeypatch, policy, directory, program, interrupt=None, **changes):
  """The players and the server of a run whose tasks a function plays."""
  monkeypatch.setattr(build_agents, 'task_runner', lambda *_: FunctionRunner(program, 0.05))  # s to end
  with build_agents.open_players(async_config(**changes), policy, str(directory), interrupt) as players:
    yield players['train'], players['eval'], players['train'].server


def play(player, policy, iteration):
  first = FIRST + iteration * sum(spec.num_groups for spec in player.specs)
  return player.play(weights(policy, iteration), KEY, SAMPLING, first, policy_version=iteration)


def say(task, tokens, prompt=PROMPT):
  """Ids of a reply of so many tokens."""
  body = {'model': 'policy', 'prompt': prompt, 'max_tokens': tokens, 'return_token_ids': True}
  status, answer = env_program._post(f'{task.base_url}/completions', task.api_key, body, PATIENCE)
  if status == 410:
    raise Over(status, 'over')
  assert status == 200, answer
  return answer['choices'][0]['token_ids']


def logprobs(sampler, params, ids):
  """Log-probs of a reply to PROMPT by one forward pass, as tokens are drawn."""
  logits, _ = forward(sampler, params, (*PROMPT, *ids))
  drawn = logits[len(PROMPT) - 1 : -1, : sampler.vocab_limit] / SAMPLING.temperature
  return np.asarray(jax.nn.log_softmax(drawn))[np.arange(len(ids)), ids]


@pytest.mark.slow
def test_a_reply_goes_on_with_new_weights_and_each_token_has_its_version(monkeypatch, policy, tmp_path):
  gate = Gate(policy.sampler)
  slow_is_sampled = threading.Event()

  def program(task):
    if task.input['seed'] == FIRST:
      say(task, 32)
    else:
      assert slow_is_sampled.wait(PATIENCE)
      say(task, 1, PROMPT[::-1])
    return 1.0

  def drive():  # the third chunk of the slow reply is the last before the weights change
    gate.wait()
    slow_is_sampled.set()
    until(lambda: server.engine.stats().queued)
    gate.allow(2)
    until(lambda: server.engine.stats().paused)
    gate.allow(1)

  own = dataclasses.replace(policy, sampler=gate)
  with opened(monkeypatch, own, tmp_path, program, num_iterations=2) as (player, _, server):
    driver = threading.Thread(target=drive, daemon=True)
    driver.start()
    fast = play(player, policy, 0)
    driver.join(PATIENCE)
    assert server.engine.stats().used == 1, 'the slow reply is in flight while the trainer learns'
    gate.open()
    slow = play(player, policy, 1)
  assert fast.trajectory.versions[fast.trajectory.loss_mask].tolist() == [0]
  t, mask = slow.trajectory, slow.trajectory.loss_mask
  assert t.versions[mask].tolist() == [0] * 12 + [1] * 20 and t.policy_version.tolist() == [0]
  ids = t.tokens[mask].tolist()
  of = [logprobs(policy.sampler, weights(policy, version), ids) for version in (0, 1)]
  np.testing.assert_allclose(t.logprobs[mask], np.concatenate([of[0][:12], of[1][12:]]), atol=2e-4)
  assert np.abs(of[0] - of[1]).max() > 1e-2, 'the weights differ'


@pytest.mark.slow
def test_nobody_waits_for_an_agent_that_is_too_slow_and_its_task_is_played_again(monkeypatch, policy, tmp_path):
  released, told = threading.Event(), []

  def program(task):
    say(task, 2)
    if task.rollout_id == 'ahead-0-1-0-0':  # the second task of the first iteration
      assert released.wait(PATIENCE)
      try:
        say(task, 2)
      except Over as e:
        told.append(e.status)
        raise
    return 1.0

  with opened(monkeypatch, policy, tmp_path, program, train__groups=2) as (player, _, server):
    tasks, stale, lag = [], [], []
    for iteration in range(4):
      rollout = play(player, policy, iteration)
      tasks += [e.level_seed - FIRST for e in rollout.episodes]
      stale.append(player.metrics['serving/groups_stale'])
      lag.append(iteration - int(rollout.trajectory.policy_version.min()))
      assert set(METRICS) <= set(player.metrics) and player.metrics['serving/wait_s'] >= 0
      ahead = player.metrics['serving/groups_ahead'] + player.metrics['serving/groups_ready']
      assert ahead == min(2 * 2, 2 * (3 - iteration))
    released.set()
    until(lambda: told)
    slow = server.lifecycle.store.ask(Tables.attempt, 'ahead-0-1-0-0.1')
  assert sorted(tasks) == list(range(8)), 'each task is trained once'
  assert stale == [0, 0, 1, 0] and max(lag) <= 1
  assert slow.state == AttemptState.CANCELLED and told == [410]


@pytest.mark.slow
def test_after_a_restart_iterations_are_repeated_with_the_same_rollouts(monkeypatch, policy, tmp_path):
  played = []

  def program(task):
    played.append(task.attempt_id)
    say(task, 3)
    return float(task.input['seed'] % 5)

  # Whatever is old enough is deleted, but not what the checkpoints of the last four iterations may need again.
  fields = dict(train__groups=2, serve__keep=1e-9, checkpoint__every=2, checkpoint__keep=1)
  with opened(monkeypatch, policy, tmp_path, program, **fields) as (player, _, _):
    before = [play(player, policy, i) for i in range(2)]
    until(lambda: player.server.lifecycle.store.ask(Tables.counts)[RolloutState.RUNNING] == 0 or len(played) >= 8)
  known = len(played)
  with opened(monkeypatch, policy, tmp_path, program, **fields) as (player, _, server):
    again = [play(player, policy, i) for i in range(2)]
    assert server.engine.stats().sampled_tokens == 0, 'nothing is sampled by the weights of a repeated iteration'
    for ours, theirs in zip(again, before, strict=True):
      jax.tree.map(np.testing.assert_array_equal, ours.trajectory, theirs.trajectory)
      assert [e.score for e in ours.episodes] == [e.score for e in theirs.episodes]
    rest = [play(player, policy, i) for i in (2, 3)]
  seeds = [e.level_seed - FIRST for rollout in (*before, *rest) for e in rollout.episodes]
  assert sorted(seeds) == list(range(8)) and known >= 4


@pytest.mark.slow
def test_an_evaluation_holds_replies_in_flight_and_takes_the_weights_of_the_next_iteration(
  monkeypatch, policy, tmp_path
):
  set_ = []

  def program(task):
    say(task, 2)
    return 1.0

  with opened(monkeypatch, policy, tmp_path, program) as (player, evaluation, server):
    original = server.engine.set_weights
    monkeypatch.setattr(server.engine, 'set_weights', lambda *a, **k: set_.append(k) or original(*a, **k))
    drains = []
    pause = server.engines.pause
    monkeypatch.setattr(server.engines, 'pause', lambda *, drain: drains.append(drain) or pause(drain=drain))
    play(player, policy, 0)
    params = weights(policy, 1)
    for _ in range(2):
      rollout = evaluation.play(params, KEY, SAMPLING, 5, policy_version=1)
      assert set(rollout.trajectory.versions[rollout.trajectory.loss_mask].tolist()) == {1}
    player.play(params, KEY, SAMPLING, FIRST + 1, policy_version=1)
  assert set_ == [{'version': 0, 'keep_cache': False}, {'version': 1, 'keep_cache': False}]
  assert drains == [False] * 4


@pytest.mark.parametrize('staleness', [pytest.param(0, marks=pytest.mark.slow), 1])
@pytest.mark.slow_cases('1')
@pytest.mark.exhaustive_cases('0')
def test_a_signal_ends_a_play_at_once_and_what_is_over_is_not_played_again(monkeypatch, policy, tmp_path, staleness):
  interrupt, played, busy, end = Interrupt(), [], threading.Event(), threading.Event()
  fields = dict(train__groups=2, serve__max_staleness=staleness, serve__max_attempts=1)
  fields |= {} if staleness else {'algorithm__tis_cap': 0.0}

  def program(task):
    played.append(task.input['seed'] - FIRST)
    say(task, 2)
    if task.input['seed'] == FIRST + 1 and not end.is_set():
      busy.set()
      assert end.wait(PATIENCE)
    return 1.0

  def stop():
    assert busy.wait(PATIENCE)
    until(lambda: store.ask(Tables.counts)[RolloutState.SUCCEEDED])
    interrupt.requested = signal.SIGTERM

  with opened(monkeypatch, policy, tmp_path, program, interrupt, num_iterations=1, **fields) as (player, _, server):
    store = server.lifecycle.store
    driver = threading.Thread(target=stop, daemon=True)
    driver.start()
    with pytest.raises(Stopped) as stopped:
      play(player, policy, 0)
    assert stopped.value.status == 143 and server.engine.stats().paused
  end.set()
  known = list(played)
  with opened(monkeypatch, policy, tmp_path, program, Interrupt(), num_iterations=1, **fields) as (player, _, server):
    rollout = play(player, policy, 0)
    assert server.lifecycle.store.ask(Tables.counts)[RolloutState.SUCCEEDED] == 2
  assert sorted(e.level_seed - FIRST for e in rollout.episodes) == [0, 1] and {e.score for e in rollout.episodes} == {
    1.0
  }
  assert sorted(known) == [0, 1] and played[len(known) :] == [1], 'a stopped attempt is no try'


@pytest.mark.parametrize('staleness', [0, 1])
def test_a_function_that_hangs_for_good_ends_the_play_with_the_reason(monkeypatch, policy, tmp_path, staleness):
  end = threading.Event()
  monkeypatch.setattr(pool, 'ABANDONED_PER_PLACE', 1)
  for module in (agent_player, async_player):
    monkeypatch.setattr(module, 'LOOK_S', 0.01)
  fields = dict(train__groups=2, serve__max_staleness=staleness, serve__max_concurrency=1, serve__timeout=0.05)
  fields |= {} if staleness else {'algorithm__tis_cap': 0.0}
  message = r"^envs\.Agent\.runner='a program of the test': no task is played .* threads of 1 .*serve\.timeout=0\.05"
  try:
    with (
      opened(monkeypatch, policy, tmp_path, lambda task: end.wait(PATIENCE), **fields) as (player, *_),
      pytest.raises(UserError, match=message),
    ):
      play(player, policy, 0)
  finally:
    end.set()


@pytest.mark.slow
def test_tasks_that_cannot_be_learnt_from_are_played_again_by_the_same_command(monkeypatch, policy, tmp_path):
  for _ in range(2):
    with (
      opened(monkeypatch, policy, tmp_path, lambda task: 1 / 0) as (player, *_),
      pytest.raises(UserError, match=r'^train: none of 1 tasks can be learnt from: .* with: .*ZeroDivisionError'),
    ):
      play(player, policy, 0)

  def program(task):
    say(task, 2)
    return 1.0

  with opened(monkeypatch, policy, tmp_path, program) as (player, _, server):
    assert [e.score for e in play(player, policy, 0).episodes] == [1.0]
    assert server.lifecycle.store.ask(Tables.last_batch) == 0


@pytest.mark.parametrize(
  ('staleness', 'how'), [pytest.param(0, 'raises', marks=pytest.mark.slow), (0, 'asks nothing'), (1, 'raises')]
)
@pytest.mark.slow_cases('0-asks nothing')
def test_an_iteration_whose_attempts_all_fail_is_empty_and_the_run_goes_on(
  monkeypatch, policy, tmp_path, caplog, staleness, how
):
  may_end = [threading.Event() for _ in range(3)]  # the tasks are over in their order, however far ahead they begin
  fields = dict(num_iterations=3, serve__max_staleness=staleness) | ({} if staleness else {'algorithm__tis_cap': 0.0})

  def program(task):
    number = task.input['seed'] - FIRST
    assert may_end[number].wait(PATIENCE)
    if number == 1 and how == 'raises':
      raise RuntimeError('the endpoint is down')
    if number != 1:
      say(task, 2)
    return 1.0

  rollouts, failed = [], []
  with opened(monkeypatch, policy, tmp_path, program, **fields) as (player, _, server):
    for iteration in range(3):
      may_end[iteration].set()
      rollouts.append(play(player, policy, iteration))
      failed.append(player.metrics['serving/attempts_failed'])
    assert not [
      r for r in server.lifecycle.store.ask(Tables.completed, 0, 10) if r.closed is None and r.iteration is None
    ]
  first, empty, last = rollouts
  assert [e.score for e in (*first.episodes, *last.episodes)] == [1.0, 1.0] and failed == [0, how == 'raises', 0]
  (episode,) = empty.episodes
  assert episode.status == Status.ENV_ERROR and not has_replies(empty.trajectory).any()
  assert ('the endpoint is down' in episode.error) == (how == 'raises')
  assert rollout_metrics(empty, 1)['train/Agent/env_errors'] == 1.0
  (line,) = [record.getMessage() for record in caplog.records if 'the run goes on' in record.getMessage()]
  assert line.startswith('train: none of 1 tasks can be learnt from: of 1 attempts ')


@pytest.mark.slow
def test_nothing_is_sampled_before_the_first_rollout(monkeypatch, policy, tmp_path):
  asked = threading.Event()

  def program(task):
    asked.set()
    try:
      say(task, 2)
    except (Over, ServerError, OSError):
      return None
    return 1.0

  with opened(monkeypatch, policy, tmp_path, program) as (player, _, server):
    player._groups.fill(0, FIRST, KEY)  # as if they were left from before a restart
    assert asked.wait(PATIENCE)
    until(lambda: server.engine.stats().queued == 2)
    assert server.engine.stats().sampled_tokens == 0
    rollout = play(player, policy, 1)
  assert set(rollout.trajectory.versions[rollout.trajectory.loss_mask].tolist()) == {1}


@pytest.mark.slow
def test_without_staleness_the_players_are_the_synchronous_ones(monkeypatch, policy, tmp_path):
  fields = {'serve__max_staleness': 0, 'algorithm__tis_cap': 0.0}
  with opened(monkeypatch, policy, tmp_path, None, **fields) as (player, evaluation, _):
    assert type(player) is type(evaluation) is AgentPlayer
    assert not player._settings.ahead and not evaluation._settings.ahead
  with opened(monkeypatch, policy, tmp_path / 'other', None, checkpoint__every=3, checkpoint__keep=2) as players:
    player, evaluation, _ = players
    assert type(player) is AsyncAgentPlayer and type(evaluation) is AgentPlayer
    assert player._settings.ahead and evaluation._settings.ahead and player._repeatable == 9
