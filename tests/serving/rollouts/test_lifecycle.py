"""Rollouts and attempts change their states as the rules say, whatever agents, workers and the server do."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import random

import pytest

from ragen_jax.serving.errors import Conflict, Gone, Invalid, NotFound, RequestError, Unauthorized
from ragen_jax.serving.rollouts.lifecycle import Lifecycle
from ragen_jax.serving.rollouts.records import OVER
from ragen_jax.serving.rollouts.store import Store
from ragen_jax.serving.rollouts.tables import Tables
from ragen_jax.serving.types import AttemptState, Finish, RolloutState
from tests.support.endpoint_store import RETRY, Clock, limits, make_call, new_rollout

S = AttemptState


@pytest.fixture
def clock():
  return Clock()


@pytest.fixture
def lifecycle(tmp_path, clock):
  with Store(tmp_path / 'store.sqlite') as store:
    yield Lifecycle(store, clock)


def _started(lifecycle, rollout_id='a', **options):
  lifecycle.create(new_rollout(rollout_id, **options))
  return lifecycle.start(rollout_id, 'w')


# -- creation and claims


def test_creation_is_idempotent(lifecycle):
  new = new_rollout('a', task={'x': [1, None, 'ü']}, group='g', metadata={'m': 1}, key=(2**32 - 1, 0))
  created = lifecycle.create(new)
  assert created.state == RolloutState.QUEUED and created.created == 1000.0
  assert (created.input, created.metadata, created.key) == (new.input, new.metadata, new.key)
  assert created == lifecycle.store.ask(Tables.rollout, 'a')
  assert lifecycle.create(dataclasses.replace(new, key=(0, 0))) == created
  claim = lifecycle.start('a', 'w')
  assert lifecycle.create(new) == claim.rollout
  for change in (
    {'input': 2}, {'group': 'h'}, {'mode': 'val'}, {'metadata': None}, {'limits': limits(timeout_s=61.0)},
  ):  # fmt: skip
    with pytest.raises(Conflict, match=r"^rollout 'a' exists with another"):
      lifecycle.create(dataclasses.replace(new, **change))
  assert len(lifecycle.store.ask(Tables.recent, 2**60, 10)) == 1


def test_ids_and_groups_are_made_where_none_are_given(lifecycle):
  first, second = lifecycle.create(new_rollout()), lifecycle.create(new_rollout())
  assert first.rollout_id != second.rollout_id
  assert first.group == first.rollout_id and first.ordinal == 0
  members = [lifecycle.create(new_rollout(group='g')) for _ in range(3)]
  assert [x.ordinal for x in members] == [0, 1, 2]


@pytest.mark.parametrize(
  ('change', 'message'),
  [
    ({'rollout_id': 'a/b'}, r"^rollout_id='a/b'; allowed: 1 to 128 letters"),
    ({'rollout_id': 'a' * 129}, r'^rollout_id='),
    ({'rollout_id': 3}, r'^rollout_id=3; '),
    ({'rollout_id': []}, r'^rollout_id=\[\]; '),
    ({'group': 'a\nb'}, r'^group='),
    ({'group': 'a' * 201}, r'^group='),
    ({'group': None}, r'^group=None; allowed: at most 200 printable characters$'),
    ({'mode': 'test'}, r"^mode='test'; allowed: 'train', 'val'$"),
    ({'input': math.nan}, r'^input is not JSON: '),
    ({'input': {'x': {1, 2}}}, r'^input is not JSON: '),
    ({'metadata': [math.inf]}, r'^metadata is not JSON: '),
    ({'key': (1, 2**32)}, r'^key='),
    ({'limits': limits(timeout_s=0.0)}, r'^timeout_s=0.0; allowed: positive numbers$'),
    ({'limits': limits(timeout_s=math.inf)}, r'^timeout_s=inf; '),
    ({'limits': limits(timeout_s=10**400)}, r'^timeout_s=1000'),
    ({'limits': limits(timeout_s='5')}, r"^timeout_s='5'; "),
    ({'limits': limits(heartbeat_s=-1)}, r'^heartbeat_s=-1; '),
    ({'limits': limits(max_attempts=0)}, r'^max_attempts=0; allowed: integers from 1$'),
    ({'limits': limits(max_attempts=True)}, r'^max_attempts=True; '),
    ({'limits': limits(retry_on=(S.CANCELLED,))}, r'^retry_on=.*; allowed: failed, timeout, unresponsive$'),
    ({'limits': limits(retry_on=([],))}, r'^retry_on='),
  ],
)
def test_values_that_are_not_allowed_are_named(lifecycle, change, message):
  with pytest.raises(Invalid, match=message) as error:
    lifecycle.create(dataclasses.replace(new_rollout('a'), **change))
  assert '\n' not in str(error.value)
  assert lifecycle.store.ask(Tables.recent, 2**60, 10) == []


def test_the_oldest_rollout_is_claimed_first(lifecycle):
  for name in 'abc':
    lifecycle.create(new_rollout(name, max_attempts=2))
  first, second = lifecycle.claim('w1'), lifecycle.claim('w2')
  assert (first.rollout.rollout_id, second.rollout.rollout_id) == ('a', 'b')
  assert first.attempt.worker == 'w1' and first.attempt.number == 1 and first.attempt.attempt_id == 'a.1'
  assert first.rollout.state == RolloutState.RUNNING and first.rollout.attempt_id == 'a.1'
  lifecycle.finish('b.1', S.FAILED, 'x')
  assert lifecycle.claim('w').attempt.attempt_id == 'b.2'  # before c, which is younger
  assert lifecycle.claim('w').rollout.rollout_id == 'c'
  assert lifecycle.claim('w') is None
  with pytest.raises(Conflict, match=r"^rollout 'c' is running; allowed: queued"):
    lifecycle.start('c', 'w')
  lifecycle.cancel('c')
  with pytest.raises(Gone, match=r"^rollout 'c' is cancelled; allowed: queued"):
    lifecycle.start('c', 'w')
  with pytest.raises(NotFound):
    lifecycle.start('d', 'w')


# -- keys


def test_a_key_belongs_to_one_attempt_and_dies_with_it(lifecycle, tmp_path):
  first, second = _started(lifecycle, 'a', max_attempts=2), _started(lifecycle, 'b')
  assert first.api_key != second.api_key and len(first.api_key) > 40
  for for_reward in (False, True):
    assert lifecycle.authenticate(first.api_key, for_reward) == first.attempt
    assert lifecycle.authenticate(second.api_key, for_reward) == second.attempt
    for wrong in ('', first.attempt.key_digest, first.api_key + 'x', '\ud800'):
      with pytest.raises(Unauthorized):
        lifecycle.authenticate(wrong, for_reward)
  lifecycle.finish('a.1', S.FAILED, '')
  lifecycle.finish('b.1', S.SUCCEEDED, '')
  again = lifecycle.claim('w')
  for for_reward in (False, True):
    with pytest.raises(Gone, match=r"^attempt 'a.1' .*\(failed\).* key"):
      lifecycle.authenticate(first.api_key, for_reward)
    assert lifecycle.authenticate(again.api_key, for_reward).attempt_id == 'a.2'
  with pytest.raises(Gone):
    lifecycle.authenticate(second.api_key, for_reward=False)
  assert lifecycle.authenticate(second.api_key, for_reward=True).attempt_id == 'b.1'
  for path in tmp_path.iterdir():
    assert first.api_key.encode() not in path.read_bytes()


# -- ends of attempts


@pytest.mark.parametrize(
  ('state', 'retry_on', 'after'),
  [
    (S.SUCCEEDED, RETRY, RolloutState.SUCCEEDED),
    (S.FAILED, RETRY, RolloutState.QUEUED),
    (S.FAILED, (S.TIMEOUT,), RolloutState.FAILED),
    (S.TIMEOUT, (S.TIMEOUT,), RolloutState.QUEUED),
    (S.TIMEOUT, (), RolloutState.FAILED),
  ],
)
def test_the_end_of_an_attempt_ends_or_requeues_its_rollout(lifecycle, clock, state, retry_on, after):
  _started(lifecycle, max_attempts=2, retry_on=retry_on)
  clock.now = 1007.0
  record = lifecycle.finish('a.1', state, 'some\nerror')
  assert record.state == after
  attempt = lifecycle.store.ask(Tables.attempt, 'a.1')
  assert (attempt.state, attempt.ended, attempt.error) == (state, 1007.0, 'some error')
  assert record.error == ('' if state == S.SUCCEEDED else 'some error')
  assert (record.ended is None) == (record.completed is None) == (after == RolloutState.QUEUED)
  assert lifecycle.finish('a.1', state, 'again') == record
  for other in (S.SUCCEEDED, S.FAILED, S.TIMEOUT):
    if other != state:
      with pytest.raises(Gone, match=rf"^attempt 'a.1' is over \({state}\)"):
        lifecycle.finish('a.1', other, '')
  with pytest.raises(Gone):
    lifecycle.heartbeat('a.1')


def test_states_that_nobody_reports_are_refused(lifecycle):
  _started(lifecycle)
  for state in (S.RUNNING, S.CANCELLED, S.UNRESPONSIVE, 'done'):
    with pytest.raises(Invalid, match=f"^state='{state}'; allowed: failed, succeeded, timeout"):
      lifecycle.finish('a.1', state, '')
  with pytest.raises(NotFound, match=r"^attempt 'b.1' does not exist"):
    lifecycle.finish('b.1', S.FAILED, '')
  assert lifecycle.store.ask(Tables.attempt, 'a.1').state == S.RUNNING


def test_attempts_are_counted(lifecycle):
  _started(lifecycle, max_attempts=3)
  for number in (1, 2):
    assert lifecycle.finish(f'a.{number}', S.FAILED, '').state == RolloutState.QUEUED
    assert lifecycle.claim('w').attempt.number == number + 1
  assert lifecycle.finish('a.3', S.FAILED, 'last').state == RolloutState.FAILED
  assert lifecycle.claim('w') is None
  assert [x.number for x in lifecycle.store.ask(Tables.attempts, 'a')] == [1, 2, 3]


def test_an_error_is_one_line_of_bounded_length(lifecycle):
  _started(lifecycle)
  error = lifecycle.finish('a.1', S.FAILED, 'x\n' * 5000 + '\ud800').error
  assert len(error) == 2000 and '\n' not in error
  lifecycle.create(new_rollout('b'))
  lifecycle.claim('w')
  assert lifecycle.finish('b.1', S.FAILED, 'a\ud800').error == 'a?'


def test_old_attempts_get_no_calls_and_no_rewards(lifecycle):
  _started(lifecycle, max_attempts=2)
  lifecycle.store.add_calls([make_call('a.1')], (), 1000.0)
  lifecycle.post_reward('a.1', 1.0, 0, '', '', '')
  lifecycle.finish('a.1', S.FAILED, '')
  lifecycle.claim('w')
  with pytest.raises(Gone, match=r"^attempt 'a.1' .*\(failed\).* no reward"):
    lifecycle.post_reward('a.1', 1.0, None, '', '', '')
  with pytest.raises(Gone):
    lifecycle.store.add_calls([make_call('a.1', 1)], (), 1000.0)
  record = lifecycle.finish('a.2', S.SUCCEEDED, '')
  assert record.attempt_id == 'a.2'
  assert (
    lifecycle.store.ask(Tables.calls, record.attempt_id) == []
    and lifecycle.store.ask(Tables.rewards, record.attempt_id) == []
  )


def test_cancellation(lifecycle):
  claim = _started(lifecycle, 'a', max_attempts=2)
  lifecycle.create(new_rollout('b'))
  for name in 'ab':
    record = lifecycle.cancel(name)
    assert record.state == RolloutState.CANCELLED and record.completed
    assert lifecycle.cancel(name) == record
  assert lifecycle.store.ask(Tables.attempt, 'a.1').state == S.CANCELLED
  with pytest.raises(Gone, match=r'\(cancelled\)'):
    lifecycle.authenticate(claim.api_key, for_reward=True)
  with pytest.raises(Gone):
    lifecycle.finish('a.1', S.SUCCEEDED, '')
  assert lifecycle.claim('w') is None
  _started(lifecycle, 'c')
  lifecycle.finish('c.1', S.SUCCEEDED, '')
  with pytest.raises(Conflict, match=r"^rollout 'c' is succeeded .* cancelled"):
    lifecycle.cancel('c')
  with pytest.raises(NotFound):
    lifecycle.cancel('d')


def test_replacing_closes_the_old_and_queues_the_new(lifecycle):
  _started(lifecycle, 'a')
  lifecycle.create(new_rollout('b'))
  _started(lifecycle, 'c')
  lifecycle.finish('c.1', S.SUCCEEDED, '')
  ended = []
  lifecycle.changes.subscribe(ended.extend)
  lifecycle.replace(['a', 'b', 'c'], [new_rollout('d', group='g'), new_rollout('e', group='g')])
  old = [lifecycle.store.ask(Tables.rollout, name) for name in 'abc']
  assert [r.state for r in old] == [RolloutState.CANCELLED] * 2 + [RolloutState.SUCCEEDED]
  assert all(r.closed is not None and r.iteration is None for r in old) and ended == ['a.1']
  assert lifecycle.store.ask(Tables.attempt, 'a.1').state == S.CANCELLED
  assert [(r.rollout_id, r.ordinal) for r in lifecycle.store.unclosed('train')] == [('d', 0), ('e', 1)]
  lifecycle.replace(['a'], ())  # again does nothing
  assert lifecycle.store.ask(Tables.rollout, 'a') == old[0]


def test_replacing_is_all_or_nothing(lifecycle):
  for name in 'abc':
    _started(lifecycle, name)
  lifecycle.finish('b.1', S.SUCCEEDED, '')
  lifecycle.store.take_batch(0, ['b'], 1.0)
  for old, new, error, message in (
    ('ab', 'd', Conflict, r"^rollout 'b' was taken by iteration 0 and cannot be replaced$"),
    ('ax', 'd', NotFound, "'x'"),
    ('a', 'dc', Conflict, r"^rollout 'c' exists, or was trained$"),
  ):
    with pytest.raises(error, match=message):
      lifecycle.replace(list(old), [new_rollout(name) for name in new])
    assert lifecycle.store.ask(Tables.rollout, 'a').state == RolloutState.RUNNING
    assert [r.rollout_id for r in lifecycle.store.unclosed('train')] == ['a', 'c']


def test_evaluations_are_claimed_first(lifecycle):
  for name, mode in (('a', 'train'), ('b', 'val'), ('c', 'train'), ('d', 'val')):
    lifecycle.create(new_rollout(name, mode=mode))
  assert [lifecycle.claim('w').rollout.rollout_id for _ in range(4)] == ['b', 'd', 'a', 'c']


# -- time


def test_an_attempt_that_takes_too_long_is_ended(lifecycle, clock):
  _started(lifecycle, timeout_s=60.0, heartbeat_s=10.0, max_attempts=2)
  for now in (1009.0, 1018.0, 1027.0, 1036.0, 1045.0, 1054.0):
    clock.now = now
    lifecycle.heartbeat('a.1')
  clock.now = 1060.0
  assert lifecycle.sweep() == []
  clock.now = 1060.5
  (ended,) = lifecycle.sweep()
  assert (ended.state, ended.error) == (S.TIMEOUT, 'took longer than timeout_s=60')
  assert lifecycle.store.ask(Tables.rollout, 'a').state == RolloutState.QUEUED
  assert lifecycle.sweep() == []


def test_a_silent_attempt_is_ended(lifecycle, clock):
  _started(lifecycle, 'a', heartbeat_s=10.0, max_attempts=2)
  _started(lifecycle, 'b', heartbeat_s=0.0)
  _started(lifecycle, 'c', heartbeat_s=10.0)
  clock.now = 1009.0
  lifecycle.store.add_calls([make_call('a.1')], (), clock.now)  # a call is a sign of life
  clock.now = 1019.0
  (ended,) = lifecycle.sweep()
  assert (ended.attempt_id, ended.state) == ('c.1', S.UNRESPONSIVE)
  assert ended.error == 'gave no sign of life for heartbeat_s=10'
  assert lifecycle.store.ask(Tables.rollout, 'c').state == RolloutState.FAILED
  clock.now = 1019.5
  assert [x.attempt_id for x in lifecycle.sweep()] == ['a.1']
  assert lifecycle.claim('w').attempt.started == 1019.5
  clock.now = 1029.0
  assert lifecycle.sweep() == []


def test_time_for_which_calls_are_held_does_not_count(tmp_path, clock):
  path = tmp_path / 'store.sqlite'
  with Store(path) as store:
    lifecycle = Lifecycle(store, clock)
    _started(lifecycle, 'a', timeout_s=60.0, heartbeat_s=10.0)
    clock.now = 1005.0
    lifecycle.pause()
    clock.now = 1015.0
    lifecycle.pause()  # changes nothing
    _started(lifecycle, 'b', timeout_s=60.0, heartbeat_s=0.0)
    clock.now = 1100.0
    assert lifecycle.sweep() == [] and lifecycle.heartbeat('a.1') == 55.0
  clock.now = 1200.0
  with Store(path) as store:  # the process has ended in an update
    lifecycle = Lifecycle(store, clock)
    lifecycle.recover(())
    clock.now = 1215.0
    assert lifecycle.sweep() == []
    lifecycle.resume()
    lifecycle.resume()  # changes nothing
    assert lifecycle.sweep() == []  # nor does the silence of this time count
    clock.now = 1224.0
    assert (lifecycle.heartbeat('a.1'), lifecycle.heartbeat('b.1')) == (46.0, 51.0)
    for clock.now in (1234.0, 1244.0, 1254.0, 1264.0, 1270.0):
      assert lifecycle.heartbeat('a.1') >= 0 and lifecycle.sweep() == []
    clock.now = 1270.5
    assert [x.attempt_id for x in lifecycle.sweep()] == ['a.1']
    clock.now = 1275.0
    assert lifecycle.sweep() == []
    clock.now = 1275.5
    (ended,) = lifecycle.sweep()
    assert (ended.attempt_id, ended.error) == ('b.1', 'took longer than timeout_s=60')


def test_silence_before_a_hold_counts_after_it(lifecycle, clock):
  _started(lifecycle, 'a', timeout_s=600.0, heartbeat_s=30.0)
  clock.now += 20.0
  lifecycle.pause()
  clock.now += 50.0
  _started(lifecycle, 'b', timeout_s=600.0, heartbeat_s=30.0)
  clock.now += 50.0
  lifecycle.resume()
  clock.now += 9.0
  assert lifecycle.sweep() == []
  clock.now += 2.0
  (ended,) = lifecycle.sweep()
  assert (ended.attempt_id, ended.state) == ('a.1', S.UNRESPONSIVE)
  clock.now += 20.0
  assert [x.attempt_id for x in lifecycle.sweep()] == ['b.1']


def test_a_restart_releases_the_workers_that_died_and_spares_the_others(tmp_path, clock):
  path = tmp_path / 'store.sqlite'
  with Store(path) as store:
    lifecycle = Lifecycle(store, clock)
    for name, worker in (('a', 'pool'), ('b', 'pool'), ('c', 'remote')):
      lifecycle.create(new_rollout(name, max_attempts=1, retry_on=()))
      lifecycle.start(name, worker)
    lifecycle.finish('b.1', S.SUCCEEDED, '')
  clock.now = 1050.0
  with Store(path) as store:
    lifecycle = Lifecycle(store, clock)
    assert lifecycle.recover({'pool'}) == 1
    assert lifecycle.sweep() == []  # c was silent for 50 s, in which there was no server
    lost = store.ask(Tables.attempt, 'a.1')
    assert (lost.state, lost.lost, lost.error) == (S.UNRESPONSIVE, True, 'the server stopped')
    assert lifecycle.claim('pool').attempt.attempt_id == 'a.2'  # a lost attempt is no try
    assert lifecycle.finish('a.2', S.FAILED, '').state == RolloutState.FAILED
    assert store.ask(Tables.rollout, 'b').state == RolloutState.SUCCEEDED
    assert lifecycle.recover({'pool'}) == 0
    lifecycle.release('c.1', 'stopped')
    assert store.ask(Tables.rollout, 'c').state == RolloutState.QUEUED
    with pytest.raises(Gone):
      lifecycle.release('c.1', 'stopped')


# -- rewards


def _values(lifecycle, attempt_id):
  return [(x.call_id, x.agent, x.name, x.value) for x in lifecycle.store.ask(Tables.rewards, attempt_id)]


def test_rewards_name_their_call(lifecycle):
  _started(lifecycle)
  calls = [
    make_call('a.1', 0, agent='writer'),
    make_call('a.1', 1, agent='checker'),
    make_call('a.1', 2, agent='writer'),
    make_call('a.1', 3, agent='checker', finish=Finish.ABORTED),
  ]
  lifecycle.store.add_calls(calls, (), 0.0)
  ids = [call.call_id for call in calls]
  for call, agent, expected in (
    (None, '', ''),
    (None, 'writer', ''),
    ('last', '', ids[2]),
    ('last', 'checker', ids[1]),
    (0, '', ids[0]),
    (1, 'checker', ids[1]),
    (ids[2], '', ids[2]),
    (ids[2], 'writer', ids[2]),
  ):
    assert lifecycle.post_reward('a.1', 1, call, agent, 'label', '').call_id == expected
    assert _values(lifecycle, 'a.1')[-1] == (expected, agent, 'label', 1.0)
  stored = len(_values(lifecycle, 'a.1'))
  for call, agent, error, message in (
    (9, '', NotFound, r"^attempt 'a.1' has no call 9$"),
    (-1, '', NotFound, r'has no call -1$'),
    (10**30, '', NotFound, r'has no call 1'),
    ('x', '', NotFound, r"^call 'x' of attempt 'a.1' does not exist$"),
    ('last', 'nobody', NotFound, r"^attempt 'a.1' has no call 'last' of agent 'nobody'$"),
    (0, 'checker', Invalid, r"^agent='checker'; allowed for call '.*': 'writer'$"),
    (3, '', Conflict, r"^call '.*' was aborted and gets no reward$"),
    (1.5, '', Invalid, r"^call=1.5; allowed: the id of a call, its index, 'last', null$"),
    (True, '', Invalid, r'^call=True; '),
  ):
    with pytest.raises(error, match=message):
      lifecycle.post_reward('a.1', 1.0, call, agent, '', '')
  assert len(_values(lifecycle, 'a.1')) == stored


def test_a_call_of_another_attempt_gets_no_reward(lifecycle):
  _started(lifecycle, 'a')
  _started(lifecycle, 'b')
  lifecycle.store.add_calls([make_call('a.1')], (), 0.0)
  with pytest.raises(NotFound):
    lifecycle.post_reward('b.1', 1.0, make_call('a.1').call_id, '', '', '')


@pytest.mark.parametrize('value', [math.nan, math.inf, -math.inf, '1', None, True, 10**400, [1.0], 1e16])
def test_rewards_are_numbers_that_training_can_square(lifecycle, value):
  _started(lifecycle)
  with pytest.raises(Invalid, match=r'^value=.*; allowed: .* 1e\+15'):
    lifecycle.post_reward('a.1', value, None, '', '', '')
  assert _values(lifecycle, 'a.1') == []


def test_a_repeated_reward_counts_once(lifecycle):
  _started(lifecycle)
  lifecycle.store.add_calls([make_call('a.1')], (), 0.0)
  first = lifecycle.post_reward('a.1', 0.1 + 0.2, 'last', '', 'x', 'id1')
  lifecycle.store.add_calls([make_call('a.1', 1)], (), 0.0)
  assert lifecycle.post_reward('a.1', 0.1 + 0.2, 'last', '', 'x', 'id1') == first
  with pytest.raises(Conflict, match=r"^attempt 'a.1' .* another reward .*id='id1'"):
    lifecycle.post_reward('a.1', 1.0, 'last', '', 'x', 'id1')
  assert lifecycle.post_reward('a.1', 0.1 + 0.2, 0, '', 'x', 'id1') == first
  for other in (1, None):  # another call, or the whole episode
    with pytest.raises(Conflict, match='has another reward'):
      lifecycle.post_reward('a.1', 0.1 + 0.2, other, '', 'x', 'id1')
  lifecycle.post_reward('a.1', 2.0, None, '', '', 'id2')  # of the whole episode, not of the last call
  with pytest.raises(Conflict, match=r"another reward .*id='id2'"):
    lifecycle.post_reward('a.1', 2.0, 'last', '', '', 'id2')
  lifecycle.post_reward('a.1', 2.0, None, '', '', '')
  lifecycle.finish('a.1', S.SUCCEEDED, '')
  lifecycle.store.close_rollouts(['a'], 0.0)
  assert lifecycle.post_reward('a.1', 0.1 + 0.2, 'last', '', 'x', 'id1') == first
  assert [x[3] for x in _values(lifecycle, 'a.1')] == [0.1 + 0.2, 2.0, 2.0]


def test_rewards_may_come_late_until_the_rollout_is_taken(lifecycle):
  for name in 'ab':
    _started(lifecycle, name)
    lifecycle.finish(f'{name}.1', S.SUCCEEDED, '')
    lifecycle.post_reward(f'{name}.1', 1.0, None, '', '', '')
  lifecycle.store.take_batch(0, ['a'], 0.0)
  lifecycle.store.close_rollouts(['b'], 0.0)
  for name in 'ab':
    with pytest.raises(Gone, match=f"^rollout '{name}' is closed .* no reward"):
      lifecycle.post_reward(f'{name}.1', 1.0, None, '', '', '')
  with pytest.raises(NotFound):
    lifecycle.post_reward('c.1', 1.0, None, '', '', '')


def test_the_number_of_rewards_is_bounded(lifecycle, monkeypatch):
  monkeypatch.setattr('ragen_jax.serving.rollouts.lifecycle._MOST_REWARDS', 2)
  _started(lifecycle)
  for _ in range(2):
    lifecycle.post_reward('a.1', 1.0, None, '', '', '')
  with pytest.raises(Conflict, match=r"^attempt 'a.1' has 2 rewards"):
    lifecycle.post_reward('a.1', 1.0, None, '', '', '')


# -- changes


def test_changes_are_announced_after_they_are_stored(lifecycle, clock):
  seen = []

  def listener(ended):
    states = [str(state) for state, n in lifecycle.store.ask(Tables.counts).items() if n]
    seen.append((states, [(x, str(lifecycle.store.ask(Tables.attempt, x).state)) for x in ended]))

  stop = lifecycle.changes.subscribe(listener)
  count = lifecycle.changes.count
  lifecycle.create(new_rollout('a', max_attempts=2))
  assert lifecycle.changes.wait(count, 60.0) == count + 1
  lifecycle.claim('w')
  lifecycle.finish('a.1', S.FAILED, '')
  lifecycle.claim('w')
  clock.now = 1100.0
  lifecycle.sweep()
  lifecycle.create(new_rollout('a', max_attempts=2))  # exists
  lifecycle.finish('a.2', S.TIMEOUT, '')  # was reported
  assert seen == [
    (['queued'], []), (['queued'], [('a.1', 'failed')]), (['failed'], [('a.2', 'timeout')]),
  ]  # fmt: skip
  stop()
  lifecycle.create(new_rollout('b'))
  assert len(seen) == 3
  assert lifecycle.changes.wait(lifecycle.changes.count, 0.0) == lifecycle.changes.count


def test_every_end_of_an_attempt_is_announced(lifecycle):
  for name, worker in (('a', 'w'), ('b', 'w'), ('c', 'w'), ('d', 'lost'), ('e', 'lost')):
    lifecycle.create(new_rollout(name))
    lifecycle.start(name, worker)
  lifecycle.create(new_rollout('queued'))
  seen = []
  lifecycle.changes.subscribe(seen.append)
  lifecycle.cancel('a')
  lifecycle.cancel('queued')
  lifecycle.finish('b.1', S.SUCCEEDED, '')
  lifecycle.release('c.1', '')
  lifecycle.recover(['lost'])
  assert seen == [('a.1',), (), ('b.1',), ('c.1',), ('d.1', 'e.1')]


# -- any order of operations


class _Model:
  """The rules once more, in the plainest form: dictionaries, and each rule in a line."""

  def __init__(self):
    self.rollouts = {}  # id -> {state, attempts: [state], max, retry, closed, iteration}
    self.batches = {}

  def end(self, name, state, lost=False):
    r = self.rollouts[name]
    r['attempts'][-1] = state
    r['lost'] += lost
    tries = len(r['attempts']) - r['lost']
    again = lost or (state in r['retry'] and tries < r['max'])
    r['state'] = 'succeeded' if state == 'succeeded' else 'queued' if again else 'failed'


def _random_operation(rng, lifecycle, clock, model):
  """Does one random thing to the store and to the model; both must agree on whether it is allowed."""
  names = [f'r{i}' for i in range(4)]
  name = rng.choice(names)
  known = model.rollouts.get(name)
  running = known is not None and known['state'] == 'running'
  attempt_id = f'{name}.{len(known["attempts"]) if known else 1}'
  what = rng.choice(['create', 'claim', 'finish', 'cancel', 'sweep', 'reward', 'call', 'take', 'close', 'release'])
  allowed = True
  with contextlib.ExitStack() as stack:
    error = stack.enter_context(_caught())
    if what == 'create':
      chance = random.Random(name)
      options = {'max_attempts': chance.randint(1, 3), 'retry_on': tuple(chance.sample(RETRY, 2)), 'heartbeat_s': 0.0}
      lifecycle.create(new_rollout(name, **options))
      new = {'state': 'queued', 'attempts': [], 'max': options['max_attempts'], 'retry': options['retry_on']}
      model.rollouts.setdefault(name, {**new, 'lost': 0, 'closed': False})
    elif what == 'claim':
      queued = [n for n, r in model.rollouts.items() if r['state'] == 'queued']  # in order of creation
      claim = lifecycle.claim('w')
      assert (claim.rollout.rollout_id if claim else None) == (queued[0] if queued else None)
      if queued:
        model.rollouts[queued[0]]['state'] = 'running'
        model.rollouts[queued[0]]['attempts'].append('running')
    elif what == 'finish':
      state = rng.choice([S.SUCCEEDED, S.FAILED, S.TIMEOUT])
      same = known is not None and known['attempts'] and known['attempts'][-1] == state
      allowed = running or same
      lifecycle.finish(attempt_id, state, '')
      if running:
        model.end(name, state)
    elif what == 'cancel':
      allowed = known is not None and known['state'] not in ('succeeded', 'failed')
      lifecycle.cancel(name)
      if running:
        known['attempts'][-1] = 'cancelled'
      known['state'] = 'cancelled'
    elif what == 'sweep':
      clock.now += rng.choice([1.0, 61.0])
      ended = lifecycle.sweep()
      late = [n for n, r in model.rollouts.items() if r['state'] == 'running' and n in {x.rollout_id for x in ended}]
      assert len(late) == len(ended)
      for late_name in late:
        model.end(late_name, 'timeout')
    elif what == 'reward':
      allowed = bool(known and known['attempts'] and known['attempts'][-1] in ('running', 'succeeded'))
      allowed = allowed and not known['closed']
      lifecycle.post_reward(attempt_id, 1.0, None, '', '', '')
    elif what == 'call':
      allowed = running
      index = len(lifecycle.store.ask(Tables.calls, attempt_id))
      lifecycle.store.add_calls([make_call(attempt_id, index)], (), clock.now)
    elif what == 'take':
      iteration = rng.randrange(3)
      allowed = known is not None and known['state'] in ('succeeded', 'failed') and not known['closed']
      allowed = (allowed and iteration not in model.batches) or model.batches.get(iteration) == name
      lifecycle.store.take_batch(iteration, [name], clock.now)
      model.batches[iteration] = name
      known['closed'] = True
    elif what == 'close':
      over = known is not None and known['state'] in {str(x) for x in OVER}
      allowed = over and name not in model.batches.values()
      lifecycle.store.close_rollouts([name], clock.now)
      known['closed'] = True
    elif what == 'release':
      allowed = running
      lifecycle.release(attempt_id, '')
      model.end(name, 'unresponsive', lost=True)
  assert (not error) == bool(allowed), (what, name, known, error)


@contextlib.contextmanager
def _caught():
  found = []
  try:
    yield found
  except RequestError as e:
    found.append(e)


@pytest.mark.parametrize('seed', [*range(6), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(6, 20))])
def test_no_order_of_operations_leads_to_a_state_that_the_rules_do_not_have(tmp_path, seed):
  rng, clock, model = random.Random(seed), Clock(), _Model()
  with Store(tmp_path / 'store.sqlite') as store:
    lifecycle = Lifecycle(store, clock)
    for _ in range(150):
      _random_operation(rng, lifecycle, clock, model)
      for name, expected in model.rollouts.items():
        record = store.ask(Tables.rollout, name)
        assert (record.state, record.closed is not None) == (expected['state'], expected['closed'])
        assert [x.state for x in store.ask(Tables.attempts, name)] == expected['attempts']
        assert (record.completed is not None) == (record.state in OVER)
        assert (record.state == RolloutState.RUNNING) == (expected['attempts'][-1:] == ['running'])
    assert {i: store.ask(Tables.batch, i) for i in range(3) if store.ask(Tables.batch, i)} == {
      i: (n,) for i, n in model.batches.items()
    }
    assert len(set(model.batches.values())) == len(model.batches)
    places = [x.completed for x in store.ask(Tables.completed, 0, 10)]
    assert places == list(range(1, len(places) + 1))


@pytest.mark.parametrize(
  'name', ['metrics/', 'metrics/Two words', 'metrics/success', 'metrics/pass@2', 'metrics/' + 'a' * 65]
)
def test_measurements_have_names_that_can_be_logged(lifecycle, name):
  claim = _started(lifecycle)
  lifecycle.post_reward(claim.attempt.attempt_id, 2.0, None, '', 'metrics/cost', '')
  with pytest.raises(Invalid, match=r'allowed: metrics/ and a name in snake case'):
    lifecycle.post_reward(claim.attempt.attempt_id, 2.0, None, '', f'metrics/{name}', '')
