"""`--mode=plan` with `plan.topology`, with this machine's own compiler in place of a chip's."""

from __future__ import annotations

import dataclasses
import io

import jax
import pytest

from ragen_jax.config.checks import check_plan
from ragen_jax.models import presets
from ragen_jax.modes import plan, plan_report
from ragen_jax.planning import estimate, programs, topologies
from ragen_jax.planning.cost import Cost
from ragen_jax.planning.estimate import Measured
from ragen_jax.planning.kernel_times import Work
from ragen_jax.utils.errors import UserError
from tests.support.configs import small_config

TOPOLOGY = topologies.parse('h100:1')


def _config(**fields):
  config = small_config(length_step=64, agent__max_context=256, **fields)
  config.update_from_flattened_dict({'plan.topology': 'h100:1', 'plan.reply_tokens': 16, 'plan.turns': 3})
  return config


@pytest.mark.parametrize(
  ('field', 'value', 'message'),
  [
    ('plan.topology', 'v5e:5x5', r"plan\.topology='v5e:5x5': allowed: v5e:1x1"),
    ('plan.reply_tokens', 0, r'plan\.reply_tokens=0: must be at least 1'),
    ('plan.observation_tokens', 0, r'plan\.observation_tokens=0: must be at least 1'),
    ('plan.longest_reply', 15, r'plan\.longest_reply=15: must be at least plan\.reply_tokens=16'),
    ('plan.turns', -1, r'plan\.turns=-1: must be at least 0'),
  ],
)
def test_assumptions_that_cannot_be_are_refused_in_one_line(field, value, message):
  config = _config()
  config.update_from_flattened_dict({field: value})
  with pytest.raises(UserError, match=message):
    check_plan(config)


def test_without_the_compiler_it_says_what_to_install_and_plans_the_memory(monkeypatch):
  asked, out = [], io.StringIO()
  monkeypatch.setattr(topologies, 'missing', lambda platform: 'is not installed')
  monkeypatch.setattr(plan.memory, 'use_cpu_devices', asked.append)
  monkeypatch.setattr(plan, 'check_config', lambda config, weights, played: None)
  monkeypatch.setattr(plan, '_write', lambda config, found, out: out.write(f'{config.plan.memory_gb:g} GiB\n'))
  found = plan.memory.MemoryPlan({'update': {'weights': 1}}, 60, 1, {'rollout': 1}, 1)
  monkeypatch.setattr(plan.memory, 'estimate', lambda config, compiled: found)
  config = _config()
  config.plan.topology = 'v5p:2x2x2'
  config.lock()
  plan.plan(config, out)
  first, _, _, last = out.getvalue().splitlines()
  assert first == "plan.topology='v5p:2x2x2': is not installed" and last == '95 GiB' and asked == [8]


@pytest.mark.slow
def test_with_the_compiler_every_program_is_compiled_and_the_run_is_told(monkeypatch):
  monkeypatch.setattr(plan_report.topologies, 'devices', lambda topology: jax.devices()[:1])
  out = io.StringIO()
  plan_report.report(_config(), TOPOLOGY, out)
  text = out.getvalue()
  names = [p.name for p in programs.programs_of(programs.make_run(_config()))]
  assert all(any(line.startswith(f'{name} ') for line in text.splitlines()) for name in names)
  for words in ('Memory, GiB per device:', 'It fits: up to', 'Seconds of an iteration', 'Together ', 'Programs: ',
                'CPU s of compilation', 'Cost of the run:', TOPOLOGY.chip.source):  # fmt: skip
    assert words in text
  assert 'refused' not in text and 'nan' not in text


def test_a_change_is_named_where_a_phase_does_not_fit():
  run = programs.make_run(_config())
  same = Cost(2**20, 0, 0, 0, 1.0, 1.0, Work(1.0, 1, {}, 0.0, 0.0), True)
  large = dataclasses.replace(same, temporary=100 * 2**30)
  for widest, words in ((same, 'It fits: up to '), (large, 'It does not fit: up to 100')):
    measured = [Measured(x, widest if x.name == 'gradient_widest' else same) for x in programs.programs_of(run)]
    out = io.StringIO()
    plan_report._write_memory(run, estimate.estimate_of(run, TOPOLOGY, measured), TOPOLOGY, out)
    assert words in out.getvalue()
    assert ('What would help: --config.model.remat=True' in out.getvalue()) == (widest is large)


def test_the_waits_for_memory_are_told_where_there_are_some():
  run = programs.make_run(_config())
  runs = sum(x.runs for x in programs.programs_of(run) if x.phase in ('rollout', 'update'))
  for waits, words in ((0.0, ' s, '), (0.25, f' s ({0.25 * runs:.2f} s of them waiting for memory), ')):
    cost = Cost(2**20, 0, 0, 0, 1.0, 1.0, Work(1.0, 1, {}, 0.0, 0.0, memory_waits=waits), True)
    measured = [Measured(x, cost) for x in programs.programs_of(run)]
    out = io.StringIO()
    plan_report._write_time(run, estimate.estimate_of(run, TOPOLOGY, measured), TOPOLOGY, measured, out)
    assert words in out.getvalue().split('Together ')[1].splitlines()[0]
    assert ('waiting' in out.getvalue()) == bool(waits)


def test_a_plan_tells_what_a_token_needs_of_a_model_with_experts():
  """As published: 30.5 billion parameters, of which 3.3 are active."""
  config = small_config(model__preset='qwen3-30b-a3b')
  shape = presets.shape('qwen3-30b-a3b', '')
  total = 30_532_122_624
  assert plan_report.size_in_words(config, total) == (
    '30532.1M parameters, of which a token uses 3353.0M, with 6.1 GFLOP to predict the next,'
  )
  config.model.separate_critic = True
  inactive = 48 * 120 * 3 * 2048 * 768
  both = 2 * total - shape.vocab_size * shape.hidden_size
  assert f'{(both - 2 * inactive) / 1e6:.1f}M, with' in plan_report.size_in_words(config, both)
  config.model.preset = 'qwen3-8b'
  assert plan_report.size_in_words(config, 8_190_000_000) == '8190.0M parameters'
