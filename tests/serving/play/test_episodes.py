"""Rollouts from finished attempts: rows as they were fed, rewards on their calls, errors that are not zeros."""

from __future__ import annotations

import dataclasses
import math

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragen_jax.agent.episode import Status
from ragen_jax.agent.rollout import concatenate
from ragen_jax.algorithms.advantages import AdvantageInputs, compute_advantages
from ragen_jax.models.vision.encoder import digest
from ragen_jax.serving.play.episodes import EpisodeSettings, FinishedAttempt, TaskAttempts, build_rollout
from ragen_jax.serving.types import AttemptState, Finish, PlacedImage, Reward
from ragen_jax.training.batches import BatchingSettings
from ragen_jax.training.estimate import EstimateSettings, RewardSettings, TargetEstimator
from ragen_jax.training.rollout_metrics import rollout_metrics
from ragen_jax.training.selection import Selection, has_replies
from ragen_jax.utils.errors import UserError
from tests.support.calls import PARAMS, STOP, Agent, assistant, decode, generated, system, user
from tests.support.estimators import REWARD, advantage_settings

START = (system('s'), user('u'))
SETTINGS = EpisodeSettings(
  group_size=1, incomplete='drop', off_policy='exclude', temperature=1.0, top_p=1.0, top_k=0, success_reward='',
  success_score=1.0, max_calls=9, stop_id=STOP, pad_id=999,
)  # fmt: skip


def _reward(value, call_id='', *, agent='', name=''):
  return Reward('attempt', call_id, agent, name, value)


def _attempt(agent, *rewards, state=AttemptState.SUCCEEDED, error=''):
  return FinishedAttempt('attempt', state, error, tuple(agent.session.calls), rewards)


def _build(*groups, **changes):
  """The rollout of groups of attempts, and its metrics."""
  tasks = [TaskAttempts('Task', 10 + g, tuple(attempts)) for g, attempts in enumerate(groups)]
  own = {'group_size': max(map(len, groups))} | changes
  return build_rollout(tasks, dataclasses.replace(SETTINGS, **own), decode)


def _two_rows():
  """Two agents take turns: calls 1 and 3 are in row 0, calls 2 and 4 in row 1."""
  agent = Agent()
  main, helper = [*START], [system('helper'), user('u')]
  for i in range(2):
    for name, messages in (('', main), ('helper', helper)):
      number = len(agent.session.calls)
      reply = generated(f'r{number}', split=5 + number, version=3 - i, value=0.1 * (number + 1))
      agent.call(*messages, reply=reply, agent=name)
      messages += [assistant(reply.text), user(f'v{i}')]
  assert [call.row for call in agent.session.calls] == [0, 1, 0, 1]
  return agent


# -- rows --------------------------------------------------------------------------------------------------------------


def test_rows_are_the_ids_that_were_fed_with_the_numbers_of_the_sampled_ones():
  agent = _two_rows()
  rollout, _ = _build([_attempt(agent, _reward(0.5, 'call 2'), _reward(1.0))])
  t, calls = rollout.trajectory, agent.session.calls
  for row in range(2):
    own = [calls[row], calls[row + 2]]
    ids = [i for call in own for i in (*call.context, *call.generated.ids)]
    assert t.tokens[row, : len(ids)].tolist() == ids and t.length[row] == len(ids)
    assert (t.tokens[row, len(ids) :] == 999).all()
    end = 0
    for turn, call in zip((row, row + 2), own, strict=True):
      start = end + len(call.context)
      sampled = slice(start, start + len(call.generated.ids))
      assert not t.loss_mask[row, end:start].any() and t.loss_mask[row, sampled].all()
      end = sampled.stop
      assert (t.turn[row, start - len(call.context) : end] == turn).all()
      for name in ('logprobs', 'values', 'entropies', 'versions'):
        np.testing.assert_array_equal(getattr(t, name)[row, sampled], getattr(call.generated, name))
      assert t.rewards[row, sampled].tolist() == [0.0] * (len(call.generated.ids) - 1) + [{1: 0.5, 3: 1.0}.get(turn, 0)]
  assert not t.logprobs[~t.loss_mask].any() and not t.rewards[~t.loss_mask].any()
  assert t.policy_version.tolist() == [2, 2] and t.versions.max() == 3
  assert t.episode.tolist() == [0, 0] and rollout.tokens_sampled == t.loss_mask.sum() == 12
  assert rollout.episode_scores.tolist() == [1.5] and t.status.tolist() == [Status.SUCCESS] * 2


def test_calls_are_turns_with_their_texts():
  agent = Agent()
  agent.call(*START, reply=generated('a', behind='STOP'))
  agent.call(*START, assistant('a'), user('v'), reply=generated('bc', finish=Finish.LENGTH))
  rollout, _ = _build([_attempt(agent, _reward(2.0, 'call 1'), _reward(-0.5, 'call 1'), _reward(0.25))])
  (episode,) = rollout.episodes
  first, second = episode.turns
  assert first.observation == decode(agent.session.calls[0].context) and first.reply == 'a'
  assert second.observation == f'{chr(STOP)}\n[user]v{chr(STOP)}\n[assistant]'
  assert (first.rewards, second.rewards) == ((2.0, -0.5), (0.25,))
  assert (first.valid, first.closed, first.tokens, second.valid) == (True, False, 5, False)
  assert first.ids == agent.session.calls[0].generated.ids
  assert (episode.tag, episode.level_seed, episode.group, episode.score) == ('Task', 10, 0, 1.75)


def test_an_episode_that_used_all_its_calls_without_success_is_cut_off():
  agent = Agent()
  agent.call(*START, reply=generated('a', finish=Finish.ABORTED))  # it counts, as for the limit of the server
  agent.call(*START, reply=generated('b'))
  for score, most, status in ((0.5, 2, Status.OUT_OF_TURNS), (0.5, 3, Status.FAILURE), (1.0, 2, Status.SUCCESS)):
    rollout, _ = _build([_attempt(agent, _reward(score))], max_calls=most)
    assert rollout.episodes[0].status == status and rollout.trajectory.status.tolist() == [status]
  rollout, _ = _build([_attempt(agent)], max_calls=2)
  assert rollout.episodes[0].status == Status.ENV_ERROR, 'no reward was posted'


@settings(max_examples=60, deadline=None)
@given(
  st.lists(
    st.lists(
      st.tuples(
        st.sampled_from(('go on', 'fork', 'new', 'abort')),
        st.booleans(),
        st.sampled_from((1.0, 0.0)),
        st.integers(0, 9),
      ),
      max_size=8,
    ),
    min_size=1,
    max_size=4,
  )
)
def test_each_trained_token_is_in_the_loss_once(attempts):
  members, expected = [], []
  for played in attempts:
    agent, said = Agent(), [START]
    for operation, trained, temperature, number in played:
      messages = {'new': (system(f's{number}'), user('u')), 'fork': said[number % len(said)]}.get(operation, said[-1])
      finish = Finish.ABORTED if operation == 'abort' else Finish.STOP
      reply = generated(f'r{number}', split=number, finish=finish)
      agent.call(*messages, reply=reply, trained=trained, params=dataclasses.replace(PARAMS, temperature=temperature))
      if finish == Finish.STOP:
        said.append((*messages, assistant(reply.text), user('v')))
        if trained and temperature == 1.0:
          expected.append(reply.ids)
    members.append(_attempt(agent, _reward(1.0)))
  rollout, metrics = _build(members, incomplete='keep')
  counted = sum(len(own) for own in attempts)
  assert metrics['serving/calls'] == counted
  if rollout is None:
    assert all(operation == 'abort' for own in attempts for operation, *_ in own)
    return
  t = rollout.trajectory
  assert t.loss_mask.sum() == sum(map(len, expected))
  found = []
  for row, turn in sorted({(r, k) for r, k in zip(*np.nonzero(t.loss_mask), strict=True)}):
    found.append((int(t.episode[row]), int(t.turn[row, turn]), int(t.tokens[row, turn])))
  by_turn = {}
  for episode, turn, token in found:
    by_turn.setdefault((episode, turn), []).append(token)
  assert [tuple(by_turn[at]) for at in sorted(by_turn)] == expected
  assert (
    metrics['serving/calls_merged']
    + sum(x for n, x in metrics.items() if n.startswith('serving/new_rows/'))
    + (metrics['serving/calls_aborted'])
    == counted
  )


# -- rewards -----------------------------------------------------------------------------------------------------------


def _credits(agent, *rewards, **changes):
  """The rewards of each turn, and the metrics."""
  rollout, metrics = _build([_attempt(agent, *rewards)], **changes)
  return [turn.rewards for turn in rollout.episodes[0].turns], metrics, rollout


def test_rewards_add_up_exactly():
  agent = Agent()
  agent.call(*START)
  values = [0.1] * 10 + [1e8, -1e8]
  _, _, rollout = _credits(agent, *(_reward(x, 'call 1') for x in values))
  assert rollout.trajectory.rewards.max() == rollout.episode_scores[0] == np.float32(math.fsum(values)) == 1


def test_rewards_land_on_their_calls_or_on_the_last_of_their_agent():
  agent = _two_rows()
  assert _credits(agent, _reward(1.0))[0] == [(), (), (), (1.0,)]
  assert _credits(agent, _reward(1.0), _reward(2.0, 'call 4'))[0] == [(), (), (), (1.0, 2.0)]
  with pytest.raises(ValueError, match='unknown call other'):
    _credits(agent, _reward(1.0, 'other'))
  agent = Agent()
  agent.call(*START, agent='writer')
  agent.call(system('t'), agent='judge')
  assert _credits(agent, _reward(1.0, agent='writer'))[0] == [(1.0,), ()]


def test_measurements_pay_nothing_and_are_reported_with_the_episode():
  rewards = [_reward(0.5, name='goal'), _reward(7.0, name='metrics/cost'), _reward(2.0, 'call 0', name='metrics/cost')]
  rollout, metrics = _build([_attempt(_two_rows(), *rewards)])
  (episode,) = rollout.episodes
  assert episode.score == 0.5 and rollout.trajectory.rewards.sum() == 0.5
  assert [turn.metrics for turn in episode.turns] == [{}, {}, {}, {'cost': 9.0}]
  assert rollout_metrics(rollout, 1)['train/Task/cost'] == 9.0
  assert {name for name in metrics if 'reward/' in name} == {'serving/reward/goal'}
  rollout, metrics = _build([_attempt(_two_rows(), *rewards[1:])])
  assert metrics['serving/attempts_without_reward'] == 1 and rollout.episodes[0].status == Status.ENV_ERROR


def test_rewards_of_agents_that_are_not_trained_are_left_out_of_the_score():
  agent = Agent()
  agent.call(*START, agent='player')
  agent.call(system('t'), agent='frozen', trained=False)
  credited, metrics, rollout = _credits(
    agent, _reward(5.0, 'call 2'), _reward(7.0, agent='frozen'), _reward(1.0, 'call 2', agent='player'), _reward(0.5)
  )
  assert credited == [(1.0, 0.5), ()] and metrics['serving/rewards_not_trained'] == 2
  assert rollout.episode_scores.tolist() == [1.5] and metrics['serving/calls_not_trained'] == 1
  t = rollout.trajectory
  assert t.loss_mask.any(axis=1).tolist() == [True, False]  # the frozen agent's row is kept, for the viewer
  rollout, metrics = _build([_attempt(agent, _reward(7.0, agent='frozen'))])
  assert rollout.episodes[0].error == 'no reward was posted' and metrics['serving/attempts_without_reward'] == 1


def test_a_reward_of_a_call_outside_the_loss_is_on_the_one_before_it_or_the_first():
  greedy = dataclasses.replace(PARAMS, temperature=0.0)
  agent, messages = Agent(), START
  for number, params in enumerate((greedy, PARAMS, greedy, PARAMS)):
    agent.call(*messages, reply=f'r{number}', params=params)
    messages += (assistant(f'r{number}'), user('v'))
  (plan,) = agent.plan(*messages)
  agent.commit(plan, generated('r', finish=Finish.ABORTED))
  rewards = [_reward(float(i), f'call {i}') for i in range(1, 6)]
  credited, metrics, rollout = _credits(agent, *rewards)
  assert credited == [(), (1.0, 2.0, 3.0), (), (4.0, 5.0)]
  assert (metrics['serving/calls_off_policy'], metrics['serving/calls_aborted']) == (2, 1)
  t = rollout.trajectory
  assert sorted(set(t.turn[t.loss_mask].tolist())) == [1, 3] and t.rewards.sum() == rollout.episode_scores[0] == 15
  with pytest.raises(UserError, match=r"call 1 of attempt attempt was sampled with .*'temperature': 0.0.*: 1.0"):
    _build([_attempt(agent, *rewards)], off_policy='error')


def test_an_episode_without_a_call_in_the_loss_keeps_its_score_and_trains_nothing():
  agent = Agent()
  agent.call(*START, params=dataclasses.replace(PARAMS, top_k=5))
  credited, _, rollout = _credits(agent, _reward(2.0))
  assert credited == [(2.0,)] and rollout.episode_scores.tolist() == [2.0]
  assert not has_replies(rollout.trajectory).any()


# -- ends --------------------------------------------------------------------------------------------------------------


def _one_call():
  agent = Agent()
  agent.call(*START)
  return agent


@pytest.mark.parametrize(
  ('rewards', 'state', 'error', 'told', 'metric'),
  [
    ((), AttemptState.SUCCEEDED, '', 'no reward was posted', 'attempts_without_reward'),
    ((_reward(1.0),), AttemptState.FAILED, 'exit status 3', 'exit status 3', 'attempts_failed'),
    ((_reward(1.0),), AttemptState.TIMEOUT, '', 'the attempt ended as timeout', 'attempts_failed'),
    ((), AttemptState.UNRESPONSIVE, '', 'the attempt ended as unresponsive', 'attempts_failed'),
  ],
)
def test_an_attempt_that_failed_or_has_no_reward_is_an_error_and_not_a_zero(rewards, state, error, told, metric):
  members = [_attempt(_one_call(), *rewards, state=state, error=error), _attempt(_one_call(), _reward(0.0))]
  rollout, metrics = _build(members)
  assert [e.status for e in rollout.episodes] == [Status.ENV_ERROR, Status.FAILURE]
  assert rollout.episodes[0].error == told and rollout.episodes[1].error == '' and metrics[f'serving/{metric}'] == 1
  assert has_replies(rollout.trajectory).tolist() == [False, True]
  assert rollout_metrics(rollout, 2)['train/Task/env_errors'] == 0.5


@pytest.mark.parametrize(
  ('rewards', 'name', 'status'),
  [
    ((_reward(0.5), _reward(0.5)), '', Status.SUCCESS), ((_reward(0.9),), '', Status.FAILURE),
    ((_reward(-3.0), _reward(1.0, name='won')), 'won', Status.SUCCESS),
    ((_reward(3.0), _reward(0.0, name='won')), 'won', Status.FAILURE), ((_reward(3.0),), 'won', Status.FAILURE),
  ],
)  # fmt: skip
def test_an_episode_succeeds_by_the_rewards_that_tell_it(rewards, name, status):
  rollout, _ = _build([_attempt(_one_call(), *rewards)], success_reward=name)
  assert rollout.episodes[0].status == rollout.trajectory.status[0] == status
  # A threshold of 0 does not make a success of a missing reward.
  rollout, _ = _build([_attempt(_one_call(), _reward(3.0))], success_reward='won', success_score=0.0)
  assert rollout.episodes[0].status == Status.FAILURE


def test_running_attempts_surplus_attempts_and_unknown_settings_are_refused():
  with pytest.raises(ValueError, match='attempt attempt is running'):
    _build([_attempt(_one_call(), state=AttemptState.RUNNING)])
  with pytest.raises(ValueError, match='2 attempts; group_size=1'):
    _build([_attempt(_one_call(), _reward(1.0))] * 2, group_size=1)
  with pytest.raises(ValueError, match="incomplete is 'pad'; it may be one of drop, keep"):
    _build([_attempt(_one_call(), _reward(1.0))], incomplete='pad')


# -- groups ------------------------------------------------------------------------------------------------------------


def test_groups_with_missing_attempts_are_dropped_or_learn_from_those_that_came():
  whole = [_attempt(_one_call(), _reward(float(i))) for i in range(2)]
  cancelled = [_attempt(_one_call(), _reward(1.0), state=AttemptState.CANCELLED), whole[1]]
  silent = [whole[0], _attempt(Agent(), _reward(1.0))]
  nothing = [_attempt(Agent()), _attempt(Agent())]
  groups = (cancelled, whole, silent, whole[:1], nothing)
  rollout, metrics = _build(*groups)
  assert metrics['serving/groups_dropped'] == 4
  assert (metrics['serving/attempts_cancelled'], metrics['serving/attempts_without_calls']) == (1, 3)
  assert [e.group for e in rollout.episodes] == [0, 0] and [e.level_seed for e in rollout.episodes] == [11, 11]
  rollout, metrics = _build(*groups, incomplete='keep')
  assert metrics['serving/groups_dropped'] == 1
  assert [e.group for e in rollout.episodes] == [0, 0, 1, 1, 2, 2, 3, 3]
  errors = [bool(e.error) for e in rollout.episodes]
  assert errors == [True, False, False, False, False, True, False, True]
  t = rollout.trajectory
  assert t.episode[has_replies(t)].tolist() == [1, 2, 3, 4, 6] and set(t.group.tolist()) == {0, 1, 2, 3}
  assert rollout_metrics(rollout, 2)['train/Task/env_errors'] == 3 / 8
  assert _build(nothing)[0] is None
  failed = [_attempt(Agent(), state=AttemptState.FAILED), whole[1]]
  assert [e.status for e in _build(failed)[0].episodes] == [Status.ENV_ERROR, Status.SUCCESS]


def test_tags_have_the_same_numbers_in_rollouts_that_dropped_other_groups():
  """`reward.grouping='inductive'` compares the rows of a tag, also with replayed ones."""
  whole, nothing = ([_attempt(agent, _reward(1.0)) for _ in range(2)] for agent in (_one_call(), Agent()))
  of_two = dataclasses.replace(SETTINGS, group_size=2)
  parts = [
    build_rollout([TaskAttempts(tag, 0, tuple(own)) for tag, own in tasks], of_two, decode)[0]
    for tasks in ((('A', nothing), ('B', whole)), (('A', whole), ('B', whole)))
  ]
  joined = concatenate(parts, renumber=True)
  assert [e.tag for e in joined.episodes] == ['B', 'B', 'A', 'A', 'B', 'B']
  assert joined.trajectory.env.tolist() == [1, 1, 0, 0, 1, 1]


def test_calls_that_begin_with_the_same_text_in_a_group_have_the_same_anchor():
  def attempt(*texts):
    agent, messages = Agent(), START
    for text in texts:
      agent.call(*messages, reply='a', trained=text != 'frozen')
      messages += (assistant('a'), user(text))
    return _attempt(agent, _reward(1.0))

  rollout, _ = _build([attempt('x', 'x', 'y'), attempt('x', 'frozen')], [attempt('x', 'x'), attempt('x', 'y', 'x')])
  assert rollout.anchors[rollout.trajectory.length > 0].tolist() == [[0, 1, 1], [0, -1, -1], [2, 3, -1], [2, 3, 4]]


def test_agents_that_begin_with_the_same_text_have_anchors_of_their_own():
  agent = Agent()
  for name in ('writer', 'critic', 'writer'):
    agent.call(*START, reply='a', agent=name)
  rollout, _ = _build([_attempt(agent, _reward(1.0))])
  assert rollout.anchors[0].tolist() == [0, 1, 0]


def test_calls_that_show_other_images_have_anchors_of_their_own():
  agent = Agent()
  _, call = agent.call(*START, reply='a')
  pixels = {digest(x): x for x in (np.full((8, 8, 3), level, np.uint8) for level in (0, 9))}
  black, white = (dataclasses.replace(call, images=(PlacedImage(2, 4, key),)) for key in pixels)
  attempts = [
    FinishedAttempt('attempt', AttemptState.SUCCEEDED, '', (own,), (_reward(1.0),), pixels)
    for own in (black, white, black)
  ]
  rollout, _ = _build(attempts)
  assert rollout.anchors[:, 0].tolist() == [0, 1, 0]
  assert rollout.trajectory.image[:, 2:4].tolist() == [[0, 0], [1, 1], [0, 0]] and len(rollout.images) == 2


def test_metrics_tell_how_calls_became_rows():
  agent = Agent()
  agent.call(*START, reply='a')
  agent.call(*START, assistant('a'), user('v'), reply='b')
  agent.call(*START, assistant('a'), user('w'), reply='c')
  agent.call(*START, reply='a')
  rollout, metrics = _build([_attempt(agent, _reward(1.0, name='won'), _reward(2.0, name='won'), _reward(5.0))])
  counts = {name: x for name, x in metrics.items() if x}
  assert counts == {
    'serving/calls': 4, 'serving/calls_merged': 1, 'serving/new_rows/first': 1, 'serving/new_rows/fork': 1,
    'serving/new_rows/repeated': 1, 'serving/reward/won': 3.0,
  }  # fmt: skip
  assert rollout.trajectory.loss_mask.any(axis=1).sum() == 3


# -- estimators --------------------------------------------------------------------------------------------------------


def _inputs(rollout):
  t = rollout.trajectory
  return AdvantageInputs(
    rewards=t.rewards, loss_mask=t.loss_mask, turn=t.turn, group=t.group, scores=rollout.scores, values=t.values,
    episode=t.episode, anchors=rollout.anchors,
  )  # fmt: skip


def _of_calls(advantages, t, episode):
  """The advantage of each call's first token, by turn."""
  found = {}
  for row, column in zip(*np.nonzero(t.loss_mask), strict=True):
    if t.episode[row] == episode:
      found.setdefault(int(t.turn[row, column]), float(advantages[row, column]))
  return [found[turn] for turn in sorted(found)]


ESTIMATORS = ('gae', 'turn_wise_gae', 'bi_level_gae', 'grpo', 'gigpo', 'rloo')


@pytest.mark.parametrize('estimator', ESTIMATORS)
def test_estimators_tell_calls_with_different_rewards_apart(estimator):
  def attempts(*rewards):
    return [_attempt(_two_rows(), *rewards), _attempt(_two_rows(), _reward(0.5, 'call 1'))]

  own = advantage_settings(estimator, gamma=0.9, lam=0.8, high_level_lam=0.7, whiten_advantages=False)
  of_calls = {}
  for name, rewards in (('early', (_reward(1.0, 'call 1'),)), ('late', (_reward(1.0, 'call 4'),))):
    rollout, _ = _build(attempts(*rewards))
    t = rollout.trajectory
    advantages = np.asarray(jax.jit(compute_advantages, static_argnums=0)(own, _inputs(rollout)).advantages)
    assert np.isfinite(advantages).all() and not advantages[~t.loss_mask].any()
    of_calls[name] = _of_calls(advantages, t, 0)
  early, late = of_calls['early'], of_calls['late']
  if estimator in ('grpo', 'rloo'):  # they compare episodes, whose scores are equal
    assert early == late and len(set(early)) == 1 and early[0] != 0
  else:
    assert early != late and late[3] > early[3] and len(set(late)) > 1


@pytest.mark.slow
def test_advantages_run_through_the_calls_in_their_order_over_all_rows():
  agent = _two_rows()
  rewards = [_reward(0.3 * i - 0.5, f'call {i}') for i in range(1, 5)]
  rollout, _ = _build([_attempt(agent, *rewards)])
  gamma, lam = 0.9, 0.8
  own = advantage_settings('gae', gamma=gamma, lam=lam, whiten_advantages=False)
  advantages = np.asarray(compute_advantages(own, _inputs(rollout)).advantages)
  expected, following, accumulator = [], 0.0, 0.0
  for i, call in reversed(list(enumerate(agent.session.calls))):
    for k in reversed(range(len(call.generated.ids))):
      reward = rewards[i].value if k == len(call.generated.ids) - 1 else 0.0
      value = float(call.generated.values[k])
      accumulator = reward + gamma * following - value + gamma * lam * accumulator
      following = value
      expected.append((i, accumulator))
  t = rollout.trajectory
  at = [(int(t.turn[r, c]), int(c), float(advantages[r, c])) for r, c in zip(*np.nonzero(t.loss_mask), strict=True)]
  found = [(turn, x) for turn, _, x in sorted(at)]
  assert [turn for turn, _ in found] == [turn for turn, _ in expected[::-1]]
  np.testing.assert_allclose([x for _, x in found], [x for _, x in expected[::-1]], atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize('credit', ['turn', 'trajectory'])
def test_the_trainer_estimates_from_such_a_rollout(credit):
  groups = [[_attempt(_two_rows(), _reward(float(g), 'call 2'), _reward(float(m))) for m in range(2)] for g in range(3)]
  rollout, _ = _build(*groups)
  t = rollout.trajectory
  keep = has_replies(t)
  selection = Selection(rollout, keep, np.ones(len(keep), np.float32), 3, len(keep), {})
  estimator = TargetEstimator(
    EstimateSettings(
      mask_loss=True, mask_advantages=True, bootstrap_truncated=False, kl_reward_coef=0.0, kl_kind='k1',
      old_logprobs='sampler', tis_cap=0.0, advantages=advantage_settings('turn_wise_gae', whiten_advantages=False),
      reward=RewardSettings(**REWARD | {'credit': credit}), batching=BatchingSettings(4, 8, False, None),
      needs_critic=True, records_values=True, banned=(),
    ),
    scorer=None,
  )  # fmt: skip

  class State:
    reference = None
    params = None

  batch, _ = estimator(State(), selection)
  assert batch.mask.sum() == t.loss_mask.sum() and np.isfinite(batch.advantages).all()
  returns = np.zeros(t.tokens.shape)
  for row in range(len(t.tokens)):
    returns[row, batch.columns[row][batch.mask[row]]] = np.asarray(batch.returns)[row][batch.mask[row]]
  for episode in range(6):
    score = rollout.episode_scores[episode]
    at = (t.episode == episode)[:, None] & (t.turn == 3) & t.loss_mask
    last = returns[at][-1]
    assert last == pytest.approx(score if credit == 'trajectory' else score - episode // 2, abs=1e-5)
