"""From costs to what a run needs, with made-up costs and sums by hand."""

from __future__ import annotations

import dataclasses
import math

import pytest

from ragen_jax.planning import estimate, programs, topologies
from ragen_jax.planning.cost import CompileFailure, Cost
from ragen_jax.planning.estimate import Measured
from ragen_jax.planning.kernel_times import Work
from tests.support.configs import small_config

TOPOLOGY = topologies.parse('v5e:2x4')
CHIP = TOPOLOGY.chip


@pytest.fixture(scope='module')
def run():
  config = small_config(num_iterations=12, algorithm__ppo_epochs=2, eval__every=3, length_step=64)
  config.update_from_flattened_dict({'plan.prompt_tokens': 60, 'plan.observation_tokens': 20, 'plan.reply_tokens': 16})
  return programs.make_run(config)


def _cost(seconds, sent=0.0, memory=100, cpu=7.0, loops=(), waits=0.0):
  work = Work(seconds, 1, {}, sent, 0.0, loops, waits)
  return Cost(memory, 20, 10, 5, cpu + 1, cpu, work, True)


def _measured(run, **other):
  return [Measured(p, other.get(p.name, _cost(1.0))) for p in programs.programs_of(run)]


def test_an_iteration_is_the_sum_of_its_programs_and_collectives(run):
  runs = {p.name: p.runs for p in programs.programs_of(run)}
  found = estimate.estimate_of(run, TOPOLOGY, _measured(run, gradient=_cost(2.0, sent=CHIP.link_bandwidth * 0.5)))
  assert found.parts['gradients'].device == 2 * runs['gradient']
  assert found.parts['gradients'].links == 0.5 * runs['gradient']
  others = sum(n for name, n in runs.items() if name not in ('gradient', 'eval_extend', 'eval_decode'))
  assert found.iteration == pytest.approx(others + 2.5 * runs['gradient'])
  assert found.evaluation == runs['eval_extend'] + runs['eval_decode'] > 0
  assert found.chip_hours == pytest.approx(8 * 12 * (found.iteration + found.evaluation) / 3600)
  n = run.lengths
  assert found.sampled == run.config.train.groups * run.config.train.group_size * n.turns * n.reply


def test_waits_for_memory_are_a_part_of_the_time_of_the_device(run):
  runs = {p.name: p.runs for p in programs.programs_of(run)}
  plain, waits = (estimate.estimate_of(run, TOPOLOGY, _measured(run, gradient=_cost(2.0, waits=x))) for x in (0.0, 0.5))
  assert waits.parts['gradients'].waiting == 0.5 * runs['gradient'] and plain.parts['gradients'].waiting == 0
  assert waits.iteration == plain.iteration


def test_memory_is_that_of_the_largest_program_with_what_the_run_holds_beside_it(run):
  resident = {p.name: p.resident for p in programs.programs_of(run)}
  found = estimate.estimate_of(run, TOPOLOGY, _measured(run, decode=_cost(1.0, memory=10**9))).memory
  assert found['rollout'] == 10**9 + 15 + resident['decode']
  assert found['update'] == 115 + max(resident[name] for name in ('gradient', 'gradient_widest', 'apply'))


def test_what_follows_from_a_refused_program_is_not_a_number(run, monkeypatch):
  def refuse(*_):
    raise CompileFailure('Ran out of memory')

  monkeypatch.setattr(estimate.cost, 'compile_program', refuse)
  (program,) = [p for p in programs.programs_of(run) if p.name == 'extend_first']
  refused = estimate.measure(program, TOPOLOGY)
  assert refused.cost is None and refused.failure == 'Ran out of memory' and refused.memory == math.inf
  measured = [refused if m.program.name == 'extend_first' else m for m in _measured(run)]
  found = estimate.estimate_of(run, TOPOLOGY, measured)
  assert math.isnan(found.iteration) and found.memory['rollout'] == math.inf
  never = dataclasses.replace(refused, program=dataclasses.replace(program, runs=0))
  assert estimate._seconds(never, TOPOLOGY).total == 0
