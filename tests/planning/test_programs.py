"""The programs of a run: which there are, how often they run, and that all of them are for any accelerator."""

from __future__ import annotations

import collections
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ragen_jax.models.attention_settings import EINSUM
from ragen_jax.planning import abstract, programs
from ragen_jax.sampling.capacity import bytes_per_device
from ragen_jax.training import optimizer_step
from tests.support.configs import small_config

_IN_FLIGHT = {'agent__rows_in_flight': 4}
# The cache of episodes needs more than the smallest size.
_GROWING = {'length_step': 64, 'agent__max_context': 256}


def _run(**fields):
  config = small_config(**fields)
  config.update_from_flattened_dict({'plan.prompt_tokens': 60, 'plan.observation_tokens': 20, 'plan.reply_tokens': 16})
  return programs.make_run(config)


def test_an_iteration_runs_its_programs_as_often_as_turns_layers_and_micro_batches_say():
  run = _run(algorithm__ppo_epochs=2, eval__every=4, **_GROWING)
  found = {p.name: p for p in programs.programs_of(run)}
  config, turns = run.config, run.lengths.turns
  assert turns > 1
  rows = config.train.groups * config.train.group_size  # fed by quarters; one row of a group reads its first prompt
  micro = rows // config.optimizer.micro_batch_size
  runs = collections.Counter()
  for p in found.values():
    runs[p.phase, p.kind] += p.runs
  share, sizes = (1 + config.eval.greedy_too) / 4, sum(p.kind == 'resize' for p in found.values())
  assert sizes > 0 and len({p.name for p in found.values()}) == len(found)
  assert runs == {
    ('rollout', 'weights'): 1, ('rollout', 'extend'): 1 + 4 * (turns - 1), ('rollout', 'decode'): turns,
    ('rollout', 'resize'): sizes * run.cfg.num_layers,
    ('evaluation', 'extend'): share * 4 * turns, ('evaluation', 'decode'): share * turns,
    ('scoring', 'score'): micro * (config.algorithm.old_logprobs == 'trainer'), ('update', 'gradient'): 2 * micro,
    ('update', 'apply'): 2 * rows // config.optimizer.mini_batch_size,
  }  # fmt: skip
  assert found['extend_first'].runs == 1 and found['decode'].loop_trips == run.lengths.longest
  shapes = {p.shape for p in found.values() if p.name.startswith(('extend', 'decode', 'resize'))}
  assert len(shapes) == sum(p.name.startswith(('extend', 'decode', 'resize')) for p in found.values())


def test_with_a_window_every_turn_begins_a_row():
  run = _run(agent__context='limited_multi_turn')
  found = {p.name: p for p in programs.programs_of(run)}
  assert 'extend_later' not in found
  calls = 1 + 4 * (run.lengths.turns - 1)  # later prompts differ
  assert sum(p.runs for name, p in found.items() if name.startswith('extend_first')) == calls
  rows = run.config.train.groups * run.config.train.group_size * run.lengths.turns
  assert found['gradient'].runs == rows / run.config.optimizer.micro_batch_size


@pytest.mark.parametrize('kl', [0.0, 0.1])
def test_what_a_run_holds_besides_the_arguments_of_a_program(kl):
  """Arguments and the rest together are the state, and the reference where there is one."""
  run = _run(algorithm__kl_loss_coef=kl, **_GROWING)
  found = {p.name: p for p in programs.programs_of(run)}
  size = bytes_per_device
  moments = size(run.state.opt_state)
  reference = size(run.state.trained['policy']) if kl else 0
  # The trained weights, but for those that decoding reads too.
  trained = size([x for x in jax.tree.leaves(run.state.params['policy']) if x.ndim > 1])
  assert found['gradient'].resident == moments + reference
  assert found['decode'].resident == moments + reference + trained and run.sampling.copied * 2 == trained
  assert found['apply'].resident == reference
  assert found['weights'].resident + trained == size(run.state.params) + moments + reference
  cache = found['resize'].resident - size(run.state.params) - run.sampling.copied - moments - reference
  assert cache > 0


def test_the_parts_of_an_optimiser_step_run_for_each_layer_and_hold_the_rest(monkeypatch):
  whole = {p.name: p for p in programs.programs_of(_run()) if p.kind == 'apply'}
  monkeypatch.setattr(optimizer_step, '_FROM_LAYERS', 2)
  run = _run()
  found = {p.name: p for p in programs.programs_of(run) if p.kind == 'apply'}
  steps, layers, size = whole['apply'].runs, run.cfg.num_layers, bytes_per_device
  for stage in ('squares', 'check', 'update'):
    assert (found[f'apply_{stage}'].runs, found[f'apply_{stage}_2'].runs) == (layers * steps, steps)
  assert found['apply_norms'].runs == found['apply_verdict'].runs == steps
  # The arguments of all updates are the state and the gradients, but for the counts of steps, which all layers read.
  held = found['apply_norms'].resident
  assert held == size((run.state.params, run.state.opt_state, run.state.trained))
  counts = size([x for x in jax.tree.leaves(run.state.opt_state) if jax.numpy.issubdtype(x.dtype, jax.numpy.integer)])
  arguments = {name: held - p.resident for name, p in found.items()}
  assert layers * arguments['apply_update'] + arguments['apply_update_2'] == held + layers * counts
  assert layers * arguments['apply_squares'] + arguments['apply_squares_2'] == size(run.state.trained)


def test_rows_are_those_that_fit_into_the_planned_memory():
  """Halves of the episodes, and weights that stay divided, on a machine with too little memory for all."""
  ample, scarce, told = (_run(**fields).sampling for fields in ({}, {'plan__memory_gb': 0.003}, _IN_FLIGHT))
  assert ample.rows == {'rollout': 16, 'evaluation': 16} and ample.gathered
  assert scarce.rows['rollout'] < 16 and 16 % scarce.rows['rollout'] == 0
  assert told.rows == {'rollout': 4, 'evaluation': 4}


def test_waiting_episodes_are_played_with_the_same_programs():
  whole, parts = (
    [p for p in programs.programs_of(_run(length_step=64, **x)) if p.name.startswith('decode')]
    for x in ({}, _IN_FLIGHT)
  )
  assert sum(p.runs * p.loop_trips for p in parts) > sum(p.runs * p.loop_trips for p in whole)
  assert parts[0].shape.startswith('4 of 4 rows') and whole[0].shape.startswith('16 of 16 rows')


def test_micro_batches_are_those_of_the_planned_memory():
  fields = {'optimizer__micro_batch_size': 0, 'optimizer__packing': True, 'model__remat': True}
  small, large = (_run(plan__memory_gb=gib, **fields) for gib in (0.01, 24))
  assert small.batching.packing.columns < large.batching.packing.columns
  names = {p.name: p for p in programs.programs_of(large)}
  assert 'bins' in names['gradient'].shape and names['gradient'].runs >= 1


@pytest.mark.slow
@pytest.mark.parametrize('platform', ['tpu', 'cuda'])
@pytest.mark.parametrize('fields', [{}, {'optimizer__packing': True, 'agent__schedule': 'continuous'} | _IN_FLIGHT])
@pytest.mark.exhaustive_cases('fields0-tpu', 'fields0-cuda', 'fields1-cuda')
def test_every_program_lowers_for_an_accelerator(monkeypatch, platform, fields):
  """Nothing in them is for CPUs only; no compiler of the platform is needed for that."""
  lower = jax.stages.Traced.lower
  for_platform = functools.partialmethod(lower, lowering_platforms=(platform,))
  monkeypatch.setattr(jax.stages.Traced, 'lower', for_platform)
  run = _run(
    model__dtype='bfloat16',
    algorithm__kl_loss_coef=0.1,
    model__remat=True,
    model__logits_chunk=64,
    **_GROWING,
    **fields,
  )
  found = programs.programs_of(run)
  assert {p.kind for p in found} >= {'weights', 'extend', 'decode', 'resize', 'gradient', 'apply', 'score'}
  for program in found:
    assert 'stablehlo' in program.lower().as_text(), program.name


def test_the_planned_chip_decides_how_rows_attend(monkeypatch):
  """A model on devices that are not there, whose kernels this machine could not run."""
  asked = []
  monkeypatch.setattr(abstract, 'choose_attention', lambda *args: asked.append(args) or EINSUM)
  abstract.abstract_policy(small_config(), jnp.bfloat16)
  assert not asked  # CPUs stand for any devices
  chip = types.SimpleNamespace(platform='tpu')
  monkeypatch.setattr(abstract, 'make_mesh', lambda **_: types.SimpleNamespace(devices=np.array([chip]), size=1))
  monkeypatch.setattr(abstract, 'make_sampler', lambda *_, **__: None)
  monkeypatch.setattr(abstract.division, 'choose', lambda *_: 1)
  config = small_config(model__attention='splash')
  abstract.abstract_policy(config, jnp.bfloat16, [chip])
  ((name, _, dtype, found),) = asked
  assert (name, dtype, found.devices.flat[0]) == ('splash', jnp.bfloat16, chip)
