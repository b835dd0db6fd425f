"""Programs that play over HTTP give the rows that the policy gives in the environment itself."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import time
import types

import jax
import numpy as np
import pytest

from ragen_jax import build, build_agents
from ragen_jax.agent.episode import Status
from ragen_jax.agent.language_model import param_state
from ragen_jax.agent.player import EnvironmentPlayer
from ragen_jax.models import lora
from ragen_jax.sampling.draw import GREEDY
from ragen_jax.sampling.sampler import Sampling
from ragen_jax.serving.client import Task
from ragen_jax.serving.play import agent_player, pool
from ragen_jax.serving.play.agent_player import AgentPlayer
from ragen_jax.serving.play.pool import LocalQueue
from ragen_jax.serving.rollouts.lifecycle import Lifecycle
from ragen_jax.serving.rollouts.records import prompt_of
from ragen_jax.serving.rollouts.store import Store
from ragen_jax.serving.rollouts.tables import Tables
from ragen_jax.serving.types import AttemptState, RolloutState
from ragen_jax.utils.errors import UserError
from tests.support.configs import small_config
from tests.support.paths import ROOT

pytest.importorskip('starlette')
pytest.importorskip('uvicorn')

SAMPLING = Sampling(0.7, 1.0, 0)
GROUPS, SIZE, FIRST = 3, 2, 90_000


def agents_config(**changes):
  given = dict(
    train__tags=('Agent',), eval__tags=('Agent',), train__groups=GROUPS, train__group_size=SIZE, eval__groups=2,
    eval__group_size=1, train__temperature=0.7, serve__port=0, serve__slots=4, serve__max_concurrency=3,
    serve__success_reward='goal', envs__Agent__max_turns=5, agent__max_context=512, agent__max_response_tokens=32,
  )  # fmt: skip
  given |= {'envs__Agent__runner': f'{ROOT}/docs/examples/frozenlake.py:play'}
  return small_config(**given | changes)


@pytest.fixture(scope='module')
def policy():
  return build.load_policy(build_config())


def build_config():
  config = small_config()
  config.model.preset = 'tiny'
  return config


@pytest.fixture(scope='module')
def played(policy, tmp_path_factory):
  """The rollout of the program, twice, that of the environment, the store's records and the metrics of the program; the
  rollout and the metrics of the built-in runner."""
  config, params, key = agents_config(), param_state(policy.model), jax.random.key(5)
  limits = small_config(agent__max_context=512, agent__max_response_tokens=32, envs__FrozenLake__max_turns=5)
  specs = build.env_specs(limits, ('FrozenLake',), (GROUPS,))
  inside = EnvironmentPlayer(build.agent_proxy(limits, policy.tokenizer, policy.sampler, specs, SIZE), policy.sampler)
  expected = inside.play(params, key, SAMPLING, FIRST, policy_version=4)
  with build_agents.open_players(config, policy, str(tmp_path_factory.mktemp('run'))) as players:
    player = players['train']
    rollout = player.play(params, key, SAMPLING, FIRST, policy_version=4)
    again = player.play(params, key, SAMPLING, FIRST, policy_version=4)
    records = player.server.lifecycle.store.ask(Tables.completed, 0, 100)
    own = rollout, again, expected, records, dict(player.metrics)
  runner = {'envs__Agent__runner': 'env:FrozenLake', 'serve__success_reward': 'success', 'serve__success_score': 0.0}
  config = agents_config(envs__FrozenLake__max_turns=5, **runner)
  with build_agents.open_players(config, policy, str(tmp_path_factory.mktemp('runner'))) as players:
    built_in = players['train'].play(params, key, SAMPLING, FIRST, policy_version=4)
  yield *own, built_in, dict(players['train'].metrics)


@pytest.mark.slow
@pytest.mark.parametrize('which', [0, 5], ids=['a program', 'the built-in runner'])
def test_rows_are_those_of_the_environment(played, which):
  rollout, expected = played[which], played[2]
  ours, theirs = rollout.trajectory, expected.trajectory
  np.testing.assert_array_equal(ours.length, theirs.length)
  for name in ('tokens', 'loss_mask', 'turn', 'group', 'episode', 'policy_version'):
    np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name), err_msg=name)
  for name in ('logprobs', 'values', 'entropies', 'rewards'):
    np.testing.assert_allclose(getattr(ours, name), getattr(theirs, name), atol=2e-4, err_msg=name)
  np.testing.assert_allclose(rollout.episode_scores, expected.episode_scores)
  # The server does not know why an episode ended without success.
  np.testing.assert_array_equal(ours.status == Status.SUCCESS, theirs.status == Status.SUCCESS)
  cut_off = theirs.status == Status.OUT_OF_TURNS
  assert cut_off.any() and (ours.status[cut_off] == Status.OUT_OF_TURNS).all()
  assert max(len(e.turns) for e in rollout.episodes) > 1, 'an episode of several calls'


@pytest.mark.slow
def test_the_built_in_runner_tells_the_environments_rewards_and_success(played):
  *_, rollout, metrics = played
  assert metrics['serving/reward/success'] == 0.0 and metrics['serving/reward/environment'] > 0
  assert {e.status for e in rollout.episodes} == {Status.SUCCESS, Status.OUT_OF_TURNS}
  assert metrics['serving/calls'] == sum(len(e.turns) for e in rollout.episodes)


@pytest.mark.slow
def test_every_call_extends_its_row(played):
  rollout, _, _, records, metrics, *_ = played
  calls = sum(len(e.turns) for e in rollout.episodes)
  assert metrics['serving/calls'] == calls
  assert metrics['serving/new_rows/first'] == GROUPS * SIZE
  assert metrics['serving/calls_merged'] == calls - GROUPS * SIZE
  assert len(records) == GROUPS * SIZE and {r.state for r in records} == {RolloutState.SUCCEEDED}


@pytest.mark.slow
def test_rollouts_that_the_store_holds_are_not_played_again(played):
  rollout, again, _, records, *_ = played
  np.testing.assert_array_equal(again.trajectory.tokens, rollout.trajectory.tokens)
  np.testing.assert_array_equal(again.trajectory.logprobs, rollout.trajectory.logprobs)
  assert {r.attempts for r in records} == {1}


@pytest.mark.slow
def test_greedy_evaluations_are_greedy(policy, tmp_path):
  config, params, key = agents_config(), param_state(policy.model), jax.random.key(5)
  limits = small_config(agent__max_context=512, agent__max_response_tokens=32, envs__FrozenLake__max_turns=5)
  specs = build.env_specs(limits, ('FrozenLake',), (2,))
  inside = EnvironmentPlayer(build.agent_proxy(limits, policy.tokenizer, policy.sampler, specs, 1), policy.sampler)
  with build_agents.open_players(config, policy, str(tmp_path)) as players:
    found = [players['eval'].play(params, key, sampling, FIRST) for sampling in (GREEDY, Sampling(0.5, 1.0, 0))]
    store = players['eval'].server.lifecycle.store
    drawn = {
      call.params.temperature
      for r in store.ask(Tables.completed, 0, 100)
      for call in store.ask(Tables.calls, r.attempt_id)
    }
  assert drawn == {0.0, 0.5}
  np.testing.assert_array_equal(found[0].trajectory.tokens, inside.play(params, key, GREEDY, FIRST).trajectory.tokens)


@pytest.mark.parametrize('section', ['train', 'eval'])
@pytest.mark.slow
def test_agents_that_fail_end_the_run_with_the_reason_and_mended_ones_play_again(policy, tmp_path, section):
  def play(program):
    runner = f'{ROOT}/tests/support/agents.py:{program}'
    config = agents_config(envs__Agent__runner=runner, serve__max_attempts=1, serve__incomplete='keep')
    with build_agents.open_players(config, policy, str(tmp_path)) as players:
      return players[section].play(param_state(policy.model), jax.random.key(0), SAMPLING, FIRST)

  with pytest.raises(UserError, match=r'of (6|2) attempts \1 failed .*RuntimeError: the program is broken'):
    play('broken')
  rollout = play('forgetful')
  assert {e.status for e in rollout.episodes if not e.error} == {Status.FAILURE}


def test_an_episode_without_a_reward_is_no_zero(policy, tmp_path):
  config = agents_config(
    envs__Agent__runner=f'{ROOT}/tests/support/agents.py:forgetful', serve__incomplete='keep', serve__max_attempts=1
  )
  with build_agents.open_players(config, policy, str(tmp_path)) as players:
    rollout = players['train'].play(param_state(policy.model), jax.random.key(0), SAMPLING, FIRST)
  by_member = np.asarray([e.status == Status.ENV_ERROR for e in rollout.episodes]).reshape(GROUPS, SIZE)
  np.testing.assert_array_equal(by_member, [[False, True]] * GROUPS)
  assert rollout.episodes[1].error == 'no reward was posted'


def test_agents_and_environments_do_not_mix():
  config = agents_config(eval__tags=('FrozenLake',))
  with pytest.raises(UserError, match=r"Agent of the type 'agent' cannot be mixed with FrozenLake"):
    build_agents.plays_agents(config)
  assert build_agents.plays_agents(agents_config()) and not build_agents.plays_agents(small_config())


def test_a_runner_that_cannot_be_imported_is_one_line(policy, tmp_path):
  config = agents_config(envs__Agent__runner='no.such.module:play')
  opened = build_agents.open_players(config, policy, str(tmp_path))
  with pytest.raises(UserError, match=r"^envs\.Agent\.runner='no\.such\.module:play' cannot be imported"), opened:
    pass


@pytest.mark.parametrize('runner', ["python 'x.py", ' '])
def test_a_command_that_cannot_be_read_is_one_line(runner):
  with pytest.raises(UserError, match=rf'^the\.field={re.escape(repr(runner))}: is no command'):
    agent_player.make_runner('the.field', runner, ())


def test_rollouts_of_other_inputs_or_limits_are_played_anew(policy, tmp_path):
  config = agents_config()
  specs = build.env_specs(config, ('Agent',), (1,))
  with Store(tmp_path / 'store.sqlite') as store:
    lifecycle = Lifecycle(store, time.time)

    def queued(timeout):
      config.serve.timeout = timeout
      settings = build_agents.agent_settings(config, policy, 'train')
      player = AgentPlayer(settings, types.SimpleNamespace(lifecycle=lifecycle), specs, SIZE, None)
      return [r for _, _, own in player._queue(jax.random.key(0), FIRST, 3, 'abc') for r in own]

    first = queued(30.0)
    claim = lifecycle.claim('worker')
    lifecycle.finish(claim.attempt.attempt_id, AttemptState.SUCCEEDED, '')
    same, other = queued(30.0), queued(99.0)
    assert {r.state for r in same} == {RolloutState.SUCCEEDED, RolloutState.QUEUED}
    assert not {r.rollout_id for r in other} & {r.rollout_id for r in first}  # an old attempt may still run
    assert [r.rollout_id for r in queued(99.0)] == [r.rollout_id for r in other]
    assert lifecycle.claim('worker').rollout.rollout_id == other[0].rollout_id  # the others are not played any more
    assert {r.state for r in other} == {RolloutState.QUEUED} and {r.limits.timeout_s for r in other} == {99.0}


def test_adapters_are_told_apart_where_nothing_else_is_trained():
  config = small_config(lora__rank=2, algorithm__adv_estimator='grpo')
  params, sampling = param_state(build.load_policy(config).model), Sampling(1.0, 1.0, 0)
  trained, frozen = lora.partition(params)
  changed = jax.tree.map(lambda x: x + 0.5 if x.ndim == 2 else x, trained)
  digests = {agent_player._digest(lora.join(x, frozen), sampling) for x in (trained, changed)}
  assert len(digests) == 2 and agent_player._digest(params, sampling) in digests


def test_remote_workers_need_a_key(policy, tmp_path, monkeypatch):
  monkeypatch.delenv('RAGEN_ADMIN_KEY', raising=False)
  opened = build_agents.open_players(agents_config(envs__Agent__runner=''), policy, str(tmp_path))
  with pytest.raises(UserError, match=r"^envs\.Agent\.runner='': .* RAGEN_ADMIN_KEY, which is not set"), opened:
    pass


@pytest.mark.slow
def test_a_run_without_a_call_of_a_trained_agent_says_whose_calls_there_are(policy, tmp_path):
  config = agents_config(serve__trained='writer')
  refused = pytest.raises(UserError, match=r"0 got no reward, .* agent .* ''$")
  with build_agents.open_players(config, policy, str(tmp_path)) as players, refused:
    players['train'].play(param_state(policy.model), jax.random.key(0), SAMPLING, FIRST)


def test_settings_are_the_configs(policy):
  config = agents_config(serve__timeout=7.0, serve__bad_calls='arguments', serve__trained='a.*')
  settings = build_agents.agent_settings(config, policy, 'train')
  assert settings.limits.timeout_s == 7.0 and settings.episodes.group_size == SIZE and settings.mode == 'train'
  assert settings.prompt == ''
  server = build_agents.server_settings(config, policy, trains=True)
  assert server.bad_calls == 'arguments' and server.trained == 'a.*' and server.engine.slots == 4
  assert server.training.temperature == 0.7 != server.evaluation.temperature
  assert dataclasses.astuple(server.engine)[0] == config.serve.slots


def test_programs_get_the_prompt_of_the_config_and_attempts_with_another_are_played_anew(policy, tmp_path):
  config = agents_config(prompt__text=' Go.\n')
  specs = build.env_specs(config, ('Agent',), (2,))
  with Store(tmp_path / 'store.sqlite') as store:
    lifecycle, ids = Lifecycle(store, time.time), []
    for text in ('Go.', 'Stay.', ''):
      config.prompt.text = text
      settings = build_agents.agent_settings(config, policy, 'train')
      player = AgentPlayer(settings, types.SimpleNamespace(lifecycle=lifecycle), specs, SIZE, None)
      records = [r for _, _, own in player._queue(jax.random.key(0), FIRST, 3, 'abc') for r in own]
      ids += [r.rollout_id for r in records]
      assert [prompt_of(r.metadata) for r in records] == [text] * 4
      assert all(r.metadata.items() >= {'tag': 'Agent', 'iteration': 3}.items() for r in records)
    assert len(set(ids)) == 12
    # As before there were prompts, so that a store of an earlier version is read.
    assert ids[8] == f'train-3-abc-{FIRST}-0' and records[0].metadata == {'tag': 'Agent', 'iteration': 3}
    claimed = LocalQueue(lifecycle, 'worker', 'http://127.0.0.1:1').claim(0.0)
    assert claimed.prompt == 'Go.' and Task.from_json(claimed.to_json(), '', 'key').prompt == 'Go.'


@pytest.mark.parametrize(('longest', 'between'), [(6.0, 2.0), (0.0, 30.0)])
def test_a_runner_sends_signs_of_life_before_an_attempt_is_late(monkeypatch, longest, between):
  made = []
  empty = contextlib.nullcontext(types.SimpleNamespace(progress=None))
  monkeypatch.setattr(agent_player, 'RunnerPool', lambda *given: made.append(given) or empty)
  server = types.SimpleNamespace(lifecycle=None, url='http://x')
  with agent_player.run_agents(server, object(), max_concurrency=1, heartbeat_s=longest):
    ((_, _, _, heartbeat_s, _),) = made
  assert heartbeat_s == between


def test_a_stop_waits_longer_than_a_program_may_take_to_be_killed(monkeypatch):
  made = []

  def make(*given):
    made.append(given)
    return contextlib.nullcontext(types.SimpleNamespace(progress='counts'))

  monkeypatch.setattr(agent_player, 'RunnerPool', make)
  server = types.SimpleNamespace(lifecycle=None, url='http://x')
  with agent_player.run_agents(server, object(), max_concurrency=1, heartbeat_s=1.0):
    assert server.progress == 'counts'
  ((*_, stop_s),) = made
  assert stop_s > agent_player._GRACE_S + pool.CLAIM_S, 'otherwise it would outlive the trainer'
