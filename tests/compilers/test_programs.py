"""The programs of a run: which there are, how often they run, and that all of them are for any accelerator."""

from __future__ import annotations

import functools

import jax
import pytest

from ragen_jax.compilers import abstract, programs
from tests.support import builders


def _run(**fields):
  config = builders.small_config(**fields)
  config.update_from_flattened_dict({'plan.prompt_tokens': 60, 'plan.observation_tokens': 20, 'plan.reply_tokens': 16})
  return programs.make_run(config)


def test_an_iteration_runs_its_programs_as_often_as_turns_layers_and_micro_batches_say():
  run = _run(algorithm__ppo_epochs=2, eval__every=4)
  found = {p.name: p for p in programs.of_run(run)}
  config, turns = run.config, run.lengths.turns
  assert turns > 1
  rows = config.train.groups * config.train.group_size
  micro = rows // config.optimizer.micro_batch_size
  runs = {name: p.runs for name, p in found.items()}
  share = (1 + config.eval.greedy_too) / 4
  assert runs == {
    'extend_first': 1, 'extend_later': turns - 1, 'decode': turns, 'order': turns - 1,
    'pick': (turns - 1) * run.cfg.num_layers, 'eval_extend': share * turns, 'eval_decode': share * turns,
    'score': micro * (config.algorithm.old_logprobs == 'trainer'), 'gradient': 2 * micro, 'gradient_widest': 0,
    'apply': 2 * rows // config.optimizer.mini_batch_size,
  }  # fmt: skip
  assert found['decode'].loop_trips == run.lengths.longest and len({p.name for p in found.values()}) == len(found)


def test_with_a_window_every_turn_begins_a_row():
  run = _run(agent__context='window')
  found = {p.name: p for p in programs.of_run(run)}
  assert 'extend_later' not in found and found['extend_first'].runs == run.lengths.turns
  rows = run.config.train.groups * run.config.train.group_size * run.lengths.turns
  assert found['gradient'].runs == rows / run.config.optimizer.micro_batch_size


@pytest.mark.parametrize('kl', [0.0, 0.1])
def test_what_a_run_holds_besides_the_arguments_of_a_program(kl):
  """Arguments and the rest together are the state, and the reference where there is one."""
  run = _run(algorithm__kl_loss_coef=kl)
  found = {p.name: p for p in programs.of_run(run)}
  size = abstract.bytes_per_device
  moments = size(run.state.opt_state)
  reference = size(run.state.trained['policy']) if kl else 0
  assert found['decode'].resident == found['gradient'].resident == moments + reference
  assert found['apply'].resident == reference
  cache = found['order'].resident - size(run.state.params) - moments - reference
  assert cache > 0 and found['pick'].resident < found['order'].resident


@pytest.mark.parametrize('platform', ['tpu', 'cuda'])
def test_every_program_lowers_for_an_accelerator(monkeypatch, platform):
  """Nothing in them is for CPUs only; no compiler of the platform is needed for that."""
  lower = jax.stages.Traced.lower
  for_platform = functools.partialmethod(lower, lowering_platforms=(platform,))
  monkeypatch.setattr(jax.stages.Traced, 'lower', for_platform)
  run = _run(model__dtype='bfloat16', algorithm__kl_loss_coef=0.1, model__remat=True, model__logits_chunk=64)
  found = programs.of_run(run)
  assert len(found) == 11
  for program in found:
    assert 'stablehlo' in program.lower().as_text(), program.name
