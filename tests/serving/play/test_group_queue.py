"""Groups are trained whole, in time and once, however slowly agents play and whenever the process ends."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter

import jax
import numpy as np
import pytest

from ragen_jax.envs import AgentTasks, Budget
from ragen_jax.envs.spec import EnvSpec
from ragen_jax.serving.play.group_queue import GroupQueue, QueueSettings
from ragen_jax.serving.rollouts.lifecycle import Lifecycle
from ragen_jax.serving.rollouts.records import OVER, prompt_of
from ragen_jax.serving.rollouts.store import Store
from ragen_jax.serving.rollouts.tables import Tables
from ragen_jax.serving.types import AttemptState, Finish, RolloutState
from ragen_jax.utils.errors import UserError
from tests.support.endpoint_store import Clock, limits, make_call, new_rollout

SIZE, FIRST = 2, 1000
# Tags A and B have two groups and one group an iteration.
SPECS = [EnvSpec(tag, AgentTasks(), Budget(5, 5, 1), 10, n) for tag, n in (('A', 2), ('B', 1))]
GROUPS = 3
KEY = jax.random.key(3)


class Run:
  """A trainer without a device: its queue, and agents that a test moves on.

  Attributes:
    queue: the queue.
    version: of the weights with which agents sample now.
  """

  def __init__(self, path, max_staleness=1, iterations=20, specs=SPECS):
    """Opens the store at `path`, as after a start of the process."""
    self.store, self.clock, self.version = Store(path), Clock(), 0
    # Does not wait for the disk, which would take most of the time.
    self.store.write = lambda durable=True: Store.write(self.store, durable=False)
    self.lifecycle = Lifecycle(self.store, self.clock)
    self.lifecycle.recover(['local'])
    settings = QueueSettings(max_staleness, iterations, SIZE, limits(max_attempts=2), 'Be brief.')
    self.queue = GroupQueue(self.lifecycle, settings, specs, self.clock)

  def __enter__(self):
    return self

  def __exit__(self, *_):
    self.store.close()

  def fill(self, iteration):
    self.version = iteration
    self.queue.fill(iteration, FIRST + GROUPS * iteration, KEY)

  def begin(self):
    """Claims a rollout; returns its attempt, None if none is queued."""
    claim = self.lifecycle.claim('local')
    return claim and claim.attempt.attempt_id

  def call(self, attempt_id, *versions, trained=True, **fields):
    """A call whose tokens have these versions; by default the present one."""
    versions = versions or (self.version,)
    call = make_call(attempt_id, len(self.store.ask(Tables.calls, attempt_id)), n=len(versions), **fields)
    generated = dataclasses.replace(call.generated, versions=np.asarray(versions, np.int32))
    self.store.add_calls([dataclasses.replace(call, generated=generated, trained=trained)], (), 0.0)

  def end(self, attempt_id, state=AttemptState.SUCCEEDED):
    self.lifecycle.finish(attempt_id, state, '')

  def play(self, count=None):
    """Plays queued rollouts to their ends with one call each."""
    while count is None or count:
      attempt_id = self.begin()
      if attempt_id is None:
        return
      self.call(attempt_id)
      self.end(attempt_id)
      count = None if count is None else count - 1

  def take(self, iteration):
    """The groups of an iteration, as the player asks for them."""
    if found := self.queue.taken(iteration):
      return found
    self.fill(iteration)
    self.queue.look()
    self.queue.renew_stale(iteration, KEY, running=True)
    return self.queue.take(iteration, KEY)

  def open_tasks(self):
    return [r for r in self.store.ask(Tables.recent, 1 << 30, 1000) if r.closed is None]


@pytest.fixture
def path(tmp_path):
  return tmp_path / 'store'


def ids(groups):
  return [record.rollout_id for group in groups for record in group.rollouts]


def oldest(run, groups):
  """The oldest version of the tokens of some groups."""
  calls = [call for group in groups for r in group.rollouts for call in run.store.ask(Tables.calls, r.attempt_id)]
  return min((int(call.generated.versions.min()) for call in calls), default=None)


def test_the_tasks_are_those_of_the_synchronous_run_in_whole_groups(path):
  with Run(path) as run:
    run.fill(0)
    records = run.store.ask(Tables.recent, 1 << 30, 100)[::-1]
    assert len(records) == 2 * GROUPS * SIZE  # k + 1 iterations
    # Iteration i has the seeds FIRST + 3 i, and two of them are those of A.
    seeds = {tag: sorted({r.input['seed'] - FIRST for r in records if r.metadata['tag'] == tag}) for tag in 'AB'}
    assert seeds == {'A': [0, 1, 3, 4], 'B': [2, 5]}
    assert {prompt_of(r.metadata) for r in records} == {'Be brief.'}
    assert all(r.input == {'seed': r.metadata['seed'], 'member': r.ordinal} for r in records)
    assert len({r.key for r in records}) == len(records)
    assert not run.queue.take(0, KEY) and run.queue.counts() == (6, 0)
    run.play()
    groups = run.take(0)
    assert [(g.tag, g.seed - FIRST) for g in groups] == [('A', 0), ('A', 1), ('B', 2)]
    assert all([r.ordinal for r in g.rollouts] == [0, 1] for g in groups)
    assert run.store.ask(Tables.batch, 0) == tuple(ids(groups)) and run.queue.counts() == (0, 3)
    run.fill(0)  # before the update: again as many as two iterations take
    assert sorted(r.metadata['number'] for r in run.open_tasks() if r.metadata['tag'] == 'B') == [1, 1, 2, 2]


@pytest.mark.parametrize('k', [1, 3])
def test_no_more_is_queued_than_can_be_trained_in_time(path, k):
  with Run(path, max_staleness=k) as run:
    for iteration in range(5):
      run.fill(iteration)
      assert len(run.open_tasks()) == (k + 1) * GROUPS * SIZE
      run.play()  # everything that is queued, at once
      groups = run.take(iteration)
      assert oldest(run, groups) == max(iteration - k, 0)
      run.fill(iteration)
      assert run.queue.renew_stale(iteration + 1, KEY, running=True) == 0


def test_the_last_iterations_queue_nothing_that_none_will_train(path):
  with Run(path, max_staleness=2, iterations=4) as run:
    for iteration in range(4):
      run.fill(iteration)
      run.play()
      assert len(run.take(iteration)) == GROUPS
      run.fill(iteration)
    assert run.open_tasks() == [] and run.store.ask(Tables.last_batch) == 3
    trained = Counter((r.metadata['tag'], r.metadata['number']) for r in run.store.ask(Tables.recent, 1 << 30, 100))
    assert trained == Counter({('A', n): SIZE for n in range(8)} | {('B', n): SIZE for n in range(4)})


def test_a_group_that_becomes_too_old_is_given_up_and_played_again(path):
  with Run(path) as run:
    run.fill(0)
    slow = run.begin()
    run.call(slow)  # with version 0
    run.play()
    for iteration in (0, 1):
      groups = run.take(iteration)
      assert slow.rpartition('.')[0] not in ids(groups) and len(groups) == GROUPS
      run.fill(iteration)
      run.version = iteration + 1
      run.play()
    before = run.store.ask(Tables.rollout, slow.rpartition('.')[0])
    assert run.queue.renew_stale(1, KEY, running=True) == 0, 'version 0 may be trained by iteration 1'
    assert run.queue.renew_stale(2, KEY, running=True) == 1
    assert run.store.ask(Tables.attempt, slow).state == AttemptState.CANCELLED
    given_up = run.store.ask(Tables.group, before.group)
    assert all(r.closed is not None and r.iteration is None for r in given_up)
    (fresh,) = {r.group for r in run.open_tasks() if r.state == RolloutState.QUEUED}
    again = run.store.ask(Tables.group, fresh)
    assert [r.input for r in again] == [r.input for r in given_up] and fresh != before.group
    assert {r.key for r in again}.isdisjoint({r.key for r in given_up})
    run.play()
    assert oldest(run, run.take(2)) >= 1
    assert before.input in [r.input for g in run.queue.taken(2) + run.take(3) for r in g.rollouts]


def test_a_group_that_has_not_begun_is_not_too_old(path):
  with Run(path) as run:
    run.fill(0)
    begun = run.begin()
    assert run.queue.renew_stale(9, KEY, running=True) == 0
    run.call(begun)
    assert run.queue.renew_stale(1, KEY, running=True) == 0 and run.queue.renew_stale(9, KEY, running=False) == 0
    assert run.queue.renew_stale(9, KEY, running=True) == 1


def test_one_old_token_makes_its_whole_group_too_old(path):
  with Run(path) as run:
    run.fill(0)
    attempts = [run.begin() for _ in range(2 * GROUPS * SIZE)]
    for attempt in attempts[1:]:
      run.call(attempt, 3)
      run.end(attempt)
    run.call(attempts[0], 3, 1, 3)
    run.end(attempts[0])
    run.queue.look()
    assert run.queue.counts() == (0, 6)
    assert run.queue.renew_stale(2, KEY, running=False) == 0
    old = run.store.ask(Tables.rollout, attempts[0].rpartition('.')[0])
    assert old.rollout_id not in ids(run.queue.take(3, KEY)) and run.queue.counts() == (0, 3)
    assert run.queue.renew_stale(3, KEY, running=False) == 1 and run.queue.counts() == (1, 2)


def test_the_age_is_that_of_tokens_that_may_be_trained(path):
  with Run(path) as run:
    run.fill(0)
    failed = run.begin()
    run.call(failed)
    run.end(failed, AttemptState.FAILED)  # its second attempt is the one that counts
    attempts = [run.begin() for _ in range(2 * GROUPS * SIZE)]
    for attempt in attempts:
      run.call(attempt, 0, finish=Finish.ABORTED)
      run.call(attempt, 0, trained=False)  # of an agent that is not trained
      run.call(attempt, 5)
      run.end(attempt)
    run.queue.look()
    assert failed not in attempts and run.queue.renew_stale(6, KEY, running=True) == 0
    assert len(run.queue.take(6, KEY)) == GROUPS


@pytest.mark.parametrize('tries', [1, 2])
def test_old_tokens_of_a_failed_attempt_make_no_group_too_old(path, tries):
  with Run(path, specs=[dataclasses.replace(SPECS[0], num_groups=1)]) as run:
    run.queue.fill(0, FIRST, KEY)
    failed, *others = [run.begin() for _ in range(SIZE)]
    for again in range(tries):  # after the second one the rollout has failed
      attempt = run.begin() if again else failed
      run.call(attempt, 0)
      run.end(attempt, AttemptState.FAILED)
    for attempt in others:
      run.call(attempt, 2)
      if tries == 2:
        run.end(attempt)
    run.queue.look()
    assert run.queue.renew_stale(2, KEY, running=True) == 0


def test_a_group_without_tokens_is_trained_in_its_turn(path):
  with Run(path, specs=SPECS[1:]) as run:
    run.fill(0)
    for _ in range(2 * SIZE):  # two attempts each
      run.end(run.begin(), AttemptState.FAILED)
    while attempt := run.begin():
      run.end(attempt, AttemptState.FAILED)
    run.queue.look()
    assert run.queue.renew_stale(9, KEY, running=True) == 0
    assert [r.metadata['number'] for g in run.queue.take(9, KEY) for r in g.rollouts] == [0, 0]


def test_the_oldest_groups_are_trained_first(path):
  with Run(path) as run:
    run.fill(0)
    attempts = [run.begin() for _ in range(2 * GROUPS * SIZE)]
    tasks = [run.store.ask(Tables.rollout, a.rpartition('.')[0]).metadata for a in attempts]
    for attempt, task in sorted(zip(attempts, tasks, strict=True), key=lambda x: -x[1]['number']):
      run.call(attempt, 7 + (task['number'] in (0, 2)))  # A: 1 and 3 are older than 0 and 2
      run.end(attempt)
    run.queue.look()
    assert [(g.tag, g.rollouts[0].metadata['number']) for g in run.queue.take(8, KEY)] == [('A', 3), ('A', 1), ('B', 1)]


def test_a_tag_that_is_slow_is_waited_for(path):
  with Run(path) as run:
    run.fill(0)
    queued = [run.begin() for _ in range(2 * GROUPS * SIZE)]
    for attempt in queued:
      if run.store.ask(Tables.rollout, attempt.rpartition('.')[0]).metadata['tag'] == 'A':
        run.call(attempt)
        run.end(attempt)
    assert run.take(0) == [] and run.queue.counts() == (2, 4)


def test_a_repeated_iteration_trains_the_same_rollouts_again(path):
  with Run(path) as run:
    taken = []
    for iteration in range(4):
      run.fill(iteration)
      run.play()
      taken.append(run.take(iteration))
    run.fill(3)
    run.play(3)  # one group and a half
    waiting = {r.rollout_id: r.state for r in run.open_tasks()}
  with Run(path) as run:  # the process was killed, and its last checkpoint is that before iteration 1
    for iteration in range(1, 4):
      assert run.queue.taken(iteration) == taken[iteration]
      run.fill(iteration)
      assert {r.rollout_id: r.state for r in run.open_tasks()} == waiting, 'nothing is queued or closed'
    run.version = 4
    run.play()
    fresh = run.take(4)
    assert set(ids(fresh)).isdisjoint(x for groups in taken for x in ids(groups)) and set(ids(fresh)) <= set(waiting)


def test_what_was_over_and_not_trained_is_not_played_again(path):
  with Run(path) as run:
    run.fill(0)
    run.play(3)
    half = run.begin()
  with Run(path) as run:
    assert run.store.ask(Tables.rollout, half.rpartition('.')[0]).state == RolloutState.QUEUED
    run.fill(0)
    run.play()
    groups = run.take(0)
    records = [r for g in groups for r in g.rollouts]
    assert sorted(r.attempts for r in records) == [1] * 5 + [2] and len(records) == GROUPS * SIZE


def test_a_crash_between_the_batch_and_its_cancelled_rollouts_leaves_nothing_open(path, monkeypatch):
  with Run(path) as run:
    run.fill(0)
    cancelled = run.begin()
    run.lifecycle.cancel(cancelled.rpartition('.')[0])
    run.play()
    monkeypatch.setattr(Store, 'close_rollouts', lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
      run.take(0)
    monkeypatch.undo()
  with Run(path) as run:
    groups = run.queue.taken(0)
    assert len(groups) == GROUPS and cancelled.rpartition('.')[0] in ids(groups)
    assert len(run.store.ask(Tables.batch, 0)) == GROUPS * SIZE - 1
    assert all(run.store.ask(Tables.rollout, i).closed is not None for i in ids(groups))
    run.fill(1)
    assert len(run.open_tasks()) == 2 * GROUPS * SIZE


def test_rollouts_of_synchronous_training_are_closed(path):
  with Run(path) as run:
    run.lifecycle.create(new_rollout('train-3-abc-5-0', group='train-3-abc-5', metadata={'tag': 'A'}))
    run.lifecycle.create(new_rollout('val-3', mode='val'))
  with Run(path) as run:
    assert run.store.ask(Tables.rollout, 'train-3-abc-5-0').state == RolloutState.CANCELLED
    assert [r.rollout_id for r in run.open_tasks()] == ['val-3'] and run.queue.counts() == (0, 0)


def test_an_iteration_whose_rollouts_were_deleted_cannot_be_repeated(path):
  with Run(path) as run:
    run.fill(0)
    run.play()
    run.take(0)
    run.store.prune(1, run.clock.now + 1, 100)
    with pytest.raises(UserError, match=r"^iteration 1 cannot be repeated: its rollout 'ahead-0-0-0-0' was deleted"):
      run.queue.taken(0)


def test_all_cancelled_is_an_error(path):
  with Run(path, specs=SPECS[1:]) as run:
    run.fill(0)
    for record in run.open_tasks():
      run.lifecycle.cancel(record.rollout_id)
    with pytest.raises(UserError, match='all rollouts of the 1 tasks of iteration 1 were cancelled'):
      run.take(0)
  with Run(path, specs=SPECS[1:]) as run:  # the same command plays the tasks again
    run.fill(0)
    run.play()
    run.queue.look()
    for iteration in (0, 1):
      (group,) = run.queue.take(iteration, KEY)
      assert [group.rollouts[0].metadata[name] for name in ('number', 'trial')] == [iteration, 1]


@pytest.mark.parametrize('crash', [False, True])
def test_an_iteration_gives_its_groups_back(path, monkeypatch, crash):
  """Of three tasks the first is taken, the second has a reward, and the third has none."""
  with Run(path, specs=SPECS[1:], max_staleness=2) as run:
    run.fill(0)
    run.play(SIZE)
    first = run.take(0)
    rewarded = run.begin()
    run.call(rewarded)
    run.lifecycle.post_reward(rewarded, 1.0, None, '', '', '')
    run.end(rewarded)
    run.play()
    run.queue.look()
    if crash:  # between the two transactions
      monkeypatch.setattr(run.lifecycle, 'replace', lambda *_: 1 / 0)
      with pytest.raises(ZeroDivisionError):
        run.queue.give_back(0, KEY)
    else:
      run.queue.give_back(0, KEY)
      assert run.queue.counts() == (2, 1)
    assert run.store.ask(Tables.batch, 0) == ()
  with Run(path, specs=SPECS[1:], max_staleness=2) as run:
    if crash:
      assert ids(run.take(0)) == ids(first)
      run.queue.give_back(0, KEY)
    run.fill(0)
    assert run.queue.counts() == (2, 1), 'nothing else is queued'
    run.play()
    groups = [run.take(iteration)[0] for iteration in range(3)]
  assert [g.rollouts[0].metadata['trial'] for g in groups] == [0, 1, 1]
  assert [g.seed for g in groups] == [FIRST + 1, FIRST, FIRST + 2] and groups[1].seed == first[0].seed
  again, before = groups[1].rollouts[0], first[0].rollouts[0]
  assert again.input == before.input and again.key != before.key and prompt_of(again.metadata) == 'Be brief.'


def test_tasks_that_were_cancelled_are_not_played_again_after_a_restart(path):
  with Run(path, specs=SPECS[1:]) as run:
    run.fill(0)
    for record in run.open_tasks():
      if record.group == 'ahead-0-0-0':
        run.lifecycle.cancel(record.rollout_id)
  for _ in range(2):
    with Run(path, specs=SPECS[1:]) as run:
      run.fill(0)
      assert run.queue.counts() == (1, 1)
      assert {r.group for r in run.open_tasks()} == {'ahead-0-0-0', 'ahead-0-1-0'}


def test_tasks_whose_attempts_all_failed_are_played_again_after_a_restart(path):
  with Run(path, specs=SPECS[1:]) as run:
    run.fill(0)
    while attempt_id := run.begin():
      run.call(attempt_id)
      run.end(attempt_id, AttemptState.SUCCEEDED if attempt_id.startswith('ahead-0-1-0-1') else AttemptState.FAILED)
  with Run(path, specs=SPECS[1:]) as run:
    run.fill(0)
    assert run.queue.counts() == (1, 1)
    assert {r.rollout_id for r in run.open_tasks() if r.state == RolloutState.QUEUED} == {
      'ahead-0-0-1-0', 'ahead-0-0-1-1'
    }  # fmt: skip


@pytest.mark.parametrize('seed', range(3))
def test_whatever_happens_each_task_is_trained_once_whole_and_in_time(path, seed):
  """Agents of random speed, crashes, and resumes from earlier iterations."""
  rng, k, iterations = random.Random(seed), 1 + seed % 2, 6
  run = Run(path, max_staleness=k, iterations=iterations)
  iteration, running, taken, stale, pace = 0, [], {}, 0, {}
  while iteration < iterations:
    if groups := run.queue.taken(iteration):
      assert ids(groups) == taken.setdefault(iteration, ids(groups))
    else:
      run.fill(iteration)
      stale += run.queue.renew_stale(iteration, KEY, running=True)
      while True:
        run.queue.look()
        stale += run.queue.renew_stale(iteration, KEY, running=False)
        if groups := run.queue.take(iteration, KEY):
          break
        if len(running) < 5 and (attempt := run.begin()):
          running.append(attempt)
        attempt = rng.choice(running)
        if attempt not in pace:
          pace[attempt] = rng.choice((1.0, 1.0, 1.0, 0.03))
        if rng.random() > pace[attempt]:
          continue
        if run.store.ask(Tables.attempt, attempt).state != AttemptState.RUNNING:
          running.remove(attempt)
        elif rng.random() < 0.5:
          run.call(attempt)
        elif run.store.ask(Tables.calls, attempt):
          run.end(attempt, AttemptState.FAILED if rng.random() < 0.1 else AttemptState.SUCCEEDED)
          running.remove(attempt)
      taken[iteration] = ids(groups)
      age = oldest(run, groups)
      assert age is None or iteration - age <= k
    assert Counter(g.tag for g in groups) == {'A': 2, 'B': 1}
    assert all(len(g.rollouts) == SIZE and {r.state for r in g.rollouts} <= OVER for g in groups)
    run.fill(iteration)
    iteration += 1
    run.version = iteration
    if rng.random() < 0.3:
      run.store.close()
      run, running = Run(path, max_staleness=k, iterations=iterations), []
      iteration = rng.randrange(iteration + 1)
  trained = [run.store.ask(Tables.rollout, x) for i in range(iterations) for x in taken[i]]
  assert len({r.rollout_id for r in trained}) == len(trained), 'nothing is trained twice'
  tasks = Counter((r.metadata['tag'], r.metadata['number']) for r in trained)
  assert tasks == {(tag, n): SIZE for tag, end in (('A', 12), ('B', 6)) for n in range(end)}, 'nothing is lost'
  assert run.open_tasks() == []
  run.store.close()
  assert stale, 'some agents were too slow'
