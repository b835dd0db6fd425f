"""What benchmarks/aot.py adds to an estimate, with made-up costs and sums by hand."""

from __future__ import annotations

import dataclasses

import jax
import pytest

from benchmarks import aot_details
from benchmarks.aot_compiled import shapes_of_run
from benchmarks.aot_details import advice, details_of, steps_of, useful_operations
from ragen_jax.planning import ahead as ahead_module
from ragen_jax.planning import estimate, program_list, programs, topologies
from ragen_jax.planning.cost import Cost
from ragen_jax.planning.estimate import Measured
from ragen_jax.planning.kernel_times import Work
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
  return [Measured(p, other.get(p.name, _cost(1.0))) for p in programs.programs_of(run)]


def _details(run, measured):
  return details_of(run, TOPOLOGY, measured, estimate.estimate_of(run, TOPOLOGY, measured))


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
  assert useful_operations(run) == pytest.approx(operations)
  found = estimate.estimate_of(run, TOPOLOGY, _measured(run))
  seconds = found.parts['gradients'].total + found.parts['optimiser'].total
  details = _details(run, _measured(run))
  assert details.mfu == pytest.approx(operations / seconds / 8 / 197e12)
  assert details.rollout == steps_of(programs.calls(run, 'rollout')) and details.rollout.decode > 0


def test_frozen_weights_need_no_gradients_of_their_own():
  full, adapters = (programs.make_run(small_config(lora__rank=rank)) for rank in (0, 4))
  assert useful_operations(adapters) * 3 == useful_operations(full) * 2


def test_the_decode_step_is_the_body_of_the_longest_loop(run):
  loops = (
    Work(1e-6, 1, {'all-gather': 1}, 1.0),
    Work(2e-3, 9, {'all-gather': 5e8, 'all-reduce': 3.0}, CHIP.link_bandwidth * 1e-3),
  )
  step = _details(run, _measured(run, decode=_cost(1.0, loops=loops))).decode
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
  made = _details(run, _measured(run, gradient=_cost(1.0, cpu=100.0))).compilation
  counts = shapes_of_run(run.config, run.lengths, run.batching, 12, rows=16, shards=1, ahead=ahead)
  compiled = {p.kind for p in programs.programs_of(run) if p.runs}
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
  assert made.programs[1] <= made.most == len(program_list.programs(run.config, run.trainer, run.sampling.rows))


def test_the_programs_of_an_optimiser_step_are_compiled_together(run, monkeypatch):
  monkeypatch.setattr(optimizer_step, '_FROM_LAYERS', 1)
  parts = programs.make_run(run.config)
  step = [p for p in programs.programs_of(parts) if p.kind == 'apply']
  whole, made = (_details(x, _measured(x)).compilation for x in (run, parts))
  assert len(step) == 8 and made.programs == whole.programs
  assert made.cpu_seconds == tuple(x + 7 * 7 for x in whole.cpu_seconds)


def _advice(config, topology=TOPOLOGY, **other):
  """What is advised where every program costs the same, but for some."""
  run = programs.make_run(config)
  same = Cost(2**20, 0, 0, 0, 1.0, 1.0, Work(1.0, 1, {}, 0.0, 0.0, (Work(1e-9, 1),)), True)
  measured = [Measured(p, dataclasses.replace(same, **other.get(p.name, {}))) for p in programs.programs_of(run)]
  found = estimate.estimate_of(run, topology, measured)
  return ' '.join(advice(run, found, details_of(run, topology, measured, found), topology))


@pytest.mark.slow
@pytest.mark.exhaustive
def test_advice_is_given_only_where_a_number_asks_for_it(monkeypatch):
  one = topologies.parse('h100:1')

  def config(**fields):
    found = small_config(length_step=64, agent__max_context=256, **fields)
    found.update_from_flattened_dict({'plan.topology': 'h100:1', 'plan.reply_tokens': 16, 'plan.turns': 3})
    return found

  assert not _advice(config(num_iterations=500), one)
  exchanging = {'work': Work(1.0, 1, {}, one.chip.link_bandwidth * 2, 0.0, (Work(1e-9, 1),))}
  sizes = {'optimizer__micro_batch_size': 1, 'optimizer__mini_batch_size': 8}
  text = _advice(config(num_iterations=500, **sizes), one, gradient=exchanging)
  assert '--config.optimizer.micro_batch_size=2 or more' in text
  with monkeypatch.context() as patch:
    patch.setattr(aot_details.division, 'choose', lambda asked, *_: asked or 4)
    text = _advice(config(num_iterations=500, agent__decode_shards=1), one)
  assert 'reads all weights for every token: --config.agent.decode_shards=4' in text
  text = _advice(config(), one, gradient={'compile_cpu_seconds': 1e7})
  assert '--config.length_step needs fewer programs (now 64)' in text
