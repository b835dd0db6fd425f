"""benchmarks/echo_trap.py: what counts as a collapse, which runs are made, and what is told of them."""

import pytest

from benchmarks import echo_trap, training_runs


def test_a_collapse_is_a_fall_below_half_of_the_best_that_stays():
  rising = [0.2, 0.3, 0.4, 0.5]
  assert echo_trap.collapsed_at(rising * 5) is None
  # Means over five: 0.5 until iteration 20, then 0.4, 0.3, 0.2 (below a half of 0.5).
  assert echo_trap.collapsed_at([0.5] * 20 + [0.0] * 10) == 22
  assert echo_trap.collapsed_at([0.5] * 20 + [0.0] * 10 + [0.5] * 5) is None
  assert echo_trap.collapsed_at([0.0] * 9) is None
  # A run that falls at once is compared with its first iteration: means of 0.5, 0.25, 0.17, ..., then 0.
  assert echo_trap.collapsed_at([0.5] + [0.0] * 9) == 2


def test_the_first_warning_is_that_of_the_monitor():
  healthy = {
    'success': 0.3,
    'in_group_reward_std': 0.4,
    'repeats': 0.1,
    'entropy': 0.2,
    'grad_norm': 1.0,
    'format': 1.0,
  }
  curves = {name: [x] * 30 for name, x in healthy.items()}
  assert echo_trap.warned_at(curves) is None
  lost = curves | {'format': [1.0] * 15 + [0.0] * 15}
  # Averages of 0.89, 0.79 and 0.71, the third one below 0.75 in iteration 18, and two more of patience.
  assert echo_trap.warned_at(lost) == 20
  assert echo_trap.warned_at(curves | {'format': [None] * 30}) is None


def test_the_search_comes_first_and_no_run_twice():
  keys = echo_trap.keys(['Bandit', 'FrozenLake'], '')
  assert len(set(keys)) == len(keys)
  searched = sum(len(echo_trap.SEARCHED[game]) for game in ('Bandit', 'FrozenLake'))
  assert keys[:searched] == echo_trap.keys(['Bandit', 'FrozenLake'], 'search')
  assert {k[1:] for k in keys if k[0] == 'Bandit' and k[3] == 4} == {
    (setting, rate, 4) for rate in echo_trap.RATES['Bandit'] for setting in echo_trap.SETTINGS
  }


def test_the_summary_counts_collapses_and_how_early_the_warning_was():
  def run(collapsed, warned, after):
    return {'collapsed_at': collapsed, 'warned_at': warned, 'held_out': [0.25, after]}

  rate = echo_trap.RATES['Bandit'][0]
  found = [run(30, 21, 0.0), run(40, None, 0.125), run(None, 12, 0.5), run(None, None, 0.75)]
  runs = {echo_trap.name_of(('Bandit', 'StarPO', rate, seed)): r for seed, r in enumerate(found)}
  runs[echo_trap.name_of(('Bandit', 'StarPO', rate / 2, 0))] = run(1, 1, 0.0)  # of the search
  assert echo_trap.summary(runs) == {
    f'Bandit / StarPO / {rate:g}': {
      'runs': 4, 'collapsed': 2, 'collapsed_at': [30, 40], 'iterations_from_warning_to_collapse': [9],
      'warned_without_collapse': 1, 'held_out_before': 0.25, 'held_out_after': [0.0, 0.125, 0.5, 0.75],
    }
  }  # fmt: skip


@pytest.mark.parametrize('jobs', [1, 2])
def test_runs_are_added_as_they_end_and_a_failure_ends_all(tmp_path, jobs):
  done = []
  training_runs.run_all([(i,) for i in range(5)], lambda key, *_: {'n': key[0]}, lambda *x: done.append(x), jobs)
  assert sorted(done) == [((i,), {'n': i}) for i in range(5)]

  def fails(key, *_):
    if key[0] == 2:
      raise ValueError('no')
    return {}

  done.clear()
  with pytest.raises(ValueError, match='no'):
    training_runs.run_all([(i,) for i in range(9)], fails, lambda *x: done.append(x[0][0]), 1)
  assert done[:2] == [0, 1] and 2 not in done


def test_flags_and_files(tmp_path):
  assert training_runs.flags(optimizer__actor_lr=1e-3, eval__tags=('A',)) == (
    '--config.optimizer.actor_lr=0.001', "--config.eval.tags=('A',)",
  )  # fmt: skip
  path = tmp_path / 'new' / 'x.json'
  training_runs.write(path, {'a': 1})
  assert path.read_text() == '{\n "a": 1\n}\n' and list(path.parent.iterdir()) == [path]
