"""From costs to what a run needs, with made-up costs and sums by hand."""

from __future__ import annotations

import dataclasses
import math

import jax
import pytest

from ragen_jax.compilers import ahead as ahead_module
from ragen_jax.compilers import estimate, needed, programs, topologies
from ragen_jax.compilers.cost import CompileFailure, Cost
from ragen_jax.compilers.estimate import Measured
from ragen_jax.compilers.lengths import shapes_of_run, steps_of
from ragen_jax.compilers.work import Work
from ragen_jax.training import optimizer_step
from tests.support.configs import small_config

TOPOLOGY = topologies.parse('v5e:2x4')
CHIP = TOPOLOGY.chip


@pytest.fixture(scope='module')
def run():
  config = small_config(num_iterations=12, algorithm__ppo_epochs=2, eval__every=3, length_step=64)
  config.update_from_flattened_dict({'plan.prompt_tokens': 60, 'plan.observation_tokens': 20, 'plan.reply_tokens': 16})
  return programs.make_run(config)


def _cost(seconds, sent=0.0, memory=100, cpu=7.0, loops=()):
  work = Work(seconds, 1, {}, sent, 0.0, loops)
  return Cost(memory, 20, 10, 5, cpu + 1, cpu, work, True)


def _measured(run, **other):
  return [Measured(p, other.get(p.name, _cost(1.0))) for p in programs.of_run(run)]


def test_an_iteration_is_the_sum_of_its_programs_and_collectives(run):
  runs = {p.name: p.runs for p in programs.of_run(run)}
  found = estimate.of_run(run, TOPOLOGY, _measured(run, gradient=_cost(2.0, sent=CHIP.link_bandwidth * 0.5)))
  assert found.parts['gradients'].device == 2 * runs['gradient']
  assert found.parts['gradients'].links == 0.5 * runs['gradient']
  others = sum(n for name, n in runs.items() if name not in ('gradient', 'eval_extend', 'eval_decode'))
  assert found.iteration == pytest.approx(others + 2.5 * runs['gradient'])
  assert found.evaluation == runs['eval_extend'] + runs['eval_decode'] > 0
  assert found.chip_hours == pytest.approx(8 * 12 * (found.iteration + found.evaluation) / 3600)
  assert found.rollout == steps_of(programs.calls(run, 'rollout')) and found.rollout.decode > 0
  n = run.lengths
  assert found.sampled == run.config.train.groups * run.config.train.group_size * n.turns * n.reply


def test_memory_is_that_of_the_largest_program_with_what_the_run_holds_beside_it(run):
  resident = {p.name: p.resident for p in programs.of_run(run)}
  found = estimate.of_run(run, TOPOLOGY, _measured(run, decode=_cost(1.0, memory=10**9))).memory
  assert found['rollout'] == 10**9 + 15 + resident['decode']
  assert found['update'] == 115 + max(resident[name] for name in ('gradient', 'gradient_widest', 'apply'))


def test_mfu_counts_only_the_products_that_learning_needs(run):
  """Counted again, weight by weight: each meets every token (the head: every sampled one) three times."""
  c, n = run.cfg, run.lengths
  attention = c.hidden_size * c.head_dim * (c.num_heads + 2 * c.num_kv_heads) + c.num_heads * c.head_dim * c.hidden_size
  mlp = 3 * c.hidden_size * c.intermediate_size
  rows = run.config.train.groups * run.config.train.group_size
  operations = 0.0
  for _ in range(c.num_layers):
    operations += 2 * (attention + mlp) * n.row
    operations += 2 * 2 * c.num_heads * c.head_dim * n.row * n.row / 2  # scores and output, half of the square
  operations += 2 * c.vocab_size * c.hidden_size * n.sampled
  operations *= 3 * rows * 2  # two epochs
  assert estimate.useful_operations(run) == pytest.approx(operations)
  found = estimate.of_run(run, TOPOLOGY, _measured(run))
  seconds = found.parts['gradients'].total + found.parts['optimiser'].total
  assert found.mfu == pytest.approx(operations / seconds / 8 / 197e12)


def test_frozen_weights_need_no_gradients_of_their_own():
  full, adapters = (programs.make_run(small_config(lora__rank=rank)) for rank in (0, 4))
  assert estimate.useful_operations(adapters) * 3 == estimate.useful_operations(full) * 2


def test_the_decode_step_is_the_body_of_the_longest_loop(run):
  loops = (
    Work(1e-6, 1, {'all-gather': 1}, 1.0),
    Work(2e-3, 9, {'all-gather': 5e8, 'all-reduce': 3.0}, CHIP.link_bandwidth * 1e-3),
  )
  step = estimate.of_run(run, TOPOLOGY, _measured(run, decode=_cost(1.0, loops=loops))).decode
  assert (step.seconds.device, step.seconds.links, step.gathered) == (2e-3, pytest.approx(1e-3), 5e8)
  assert step.collectives == 5e8 + 3
  c, n = run.cfg, run.lengths
  weights = sum(x.size for x in jax.tree.leaves(run.state.params['policy']))
  rows = run.config.train.groups * run.config.train.group_size
  cache = 2 * c.num_layers * c.num_kv_heads * c.head_dim * rows * (n.row // 2)
  size = 4 if run.config.model.dtype == 'float32' else 2
  assert step.floor == pytest.approx(size * (weights + cache) / CHIP.hbm_bandwidth, rel=0.02)  # norms and biases apart


@pytest.mark.parametrize(('setting', 'images', 'ahead'), [(0, 0, False), (-1, 0, True), (-1, 7, False)])
def test_compilation_counts_every_shape_of_a_run_once(run, monkeypatch, setting, images, ahead):
  """The programs that are compiled ahead are those that a run on the planned machine compiles ahead."""
  run.config.compile_ahead = setting
  monkeypatch.setattr(ahead_module, 'visual_columns', lambda config: images)
  made = estimate.of_run(run, TOPOLOGY, _measured(run, gradient=_cost(1.0, cpu=100.0))).compilation
  counts = shapes_of_run(run.config, run.lengths, run.batching, 12, rows=16, shards=1, ahead=ahead)
  compiled = {p.kind for p in programs.of_run(run) if p.runs}
  assert ('score' in compiled) == (run.config.algorithm.old_logprobs == 'trainer')
  assert run.rows('evaluation') == run.rows('rollout') and run.config.eval.greedy_too
  for part, programs_of_part, cpu_seconds in (
    ('programs', made.programs, made.cpu_seconds), ('awaited', None, made.awaited)
  ):  # fmt: skip
    first, last = (getattr(counts[i], part) for i in (0, -1))
    more = first['decode']  # of the greedy evaluation; temperatures above 0 share a program
    for i, count in enumerate((first, last)):
      used = {kind: n for kind, n in count.items() if kind in compiled} | {'weights': 1}
      assert programs_of_part is None or programs_of_part[i] == sum(used.values()) + more
      assert cpu_seconds[i] == 7 * (sum(used.values()) - used['gradient'] + more) + 100 * used['gradient']
  waits = [{kind: n for kind, n in c.awaited.items() if kind in compiled} for c in counts]
  assert waits[made.last_awaited - 1 :] == waits[-1:] * (13 - made.last_awaited)
  assert made.last_awaited == 1 or waits[made.last_awaited - 2] != waits[-1]
  assert made.programs[1] <= made.most == len(needed.programs(run.config, run.trainer, run.sampling.rows))


def test_the_programs_of_an_optimiser_step_are_compiled_together(run, monkeypatch):
  monkeypatch.setattr(optimizer_step, '_FROM_LAYERS', 1)
  parts = programs.make_run(run.config)
  step = [p for p in programs.of_run(parts) if p.kind == 'apply']
  whole, made = (estimate.of_run(x, TOPOLOGY, _measured(x)).compilation for x in (run, parts))
  assert len(step) == 8 and made.programs == whole.programs
  assert made.cpu_seconds == tuple(x + 7 * 7 for x in whole.cpu_seconds)


def test_what_follows_from_a_refused_program_is_not_a_number(run, monkeypatch):
  def refuse(*_):
    raise CompileFailure('Ran out of memory')

  monkeypatch.setattr(estimate.cost, 'compile_program', refuse)
  (program,) = [p for p in programs.of_run(run) if p.name == 'extend_first']
  refused = estimate.measure(program, TOPOLOGY)
  assert refused.cost is None and refused.failure == 'Ran out of memory' and refused.memory == math.inf
  measured = [refused if m.program.name == 'extend_first' else m for m in _measured(run)]
  found = estimate.of_run(run, TOPOLOGY, measured)
  assert math.isnan(found.iteration) and math.isnan(found.decode.seconds.total)
  assert found.memory['rollout'] == math.inf and math.isfinite(found.mfu)
  never = dataclasses.replace(refused, program=dataclasses.replace(program, runs=0))
  assert estimate._seconds(never, TOPOLOGY).total == 0
