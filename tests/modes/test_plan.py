"""`--mode=plan`: fields that are refused, the changes that it proposes, and the command as a user runs it."""

from __future__ import annotations

import io
import json
import operator
import os
import re
import subprocess
import sys

import pytest

from ragen_jax.modes import plan, plan_changes
from ragen_jax.planning import memory
from ragen_jax.planning.host_fit import ADAPTERS
from tests.support.configs import small_config
from tests.support.paths import ROOT


def _estimate_by(numbers):
  """In place of `memory.estimate`: 100 bytes in the update and less elsewhere, as the config's fields change them."""

  def estimate(config, compiled):
    saved = sum(bytes for field, (value, bytes) in numbers.items() if operator.attrgetter(field)(config) == value)
    return memory.MemoryPlan({'update': {'weights': 100 - saved}, 'rollout': {'weights': 10}}, 60, 1, {'rollout': 1}, 1)

  return estimate


def test_a_change_that_does_not_help_is_not_advised(monkeypatch):
  config = small_config()
  monkeypatch.setattr(memory, 'estimate', _estimate_by({'model.logits_chunk': (1024, 45)}))
  changes, changed, found = plan_changes.fit(config, memory.estimate(config, {}), {})
  assert changes == {'model.logits_chunk': 1024} and found.fits and not changed.model.remat


def test_activations_that_were_not_known_before_do_not_speak_against_a_change(monkeypatch):
  """Weights of 80 bytes do not fit into 60, so programs are not compiled; those of 40 do, and their programs do not."""

  def estimate(config, compiled):
    kinds = {'weights': 40 if config.model.remat else 80}
    if config.model.remat:
      kinds['activations'] = 10 if config.model.logits_chunk else 50
    return memory.MemoryPlan({'update': kinds, 'rollout': {}}, 60, 1, {'rollout': 1}, 1)

  monkeypatch.setattr(memory, 'estimate', estimate)
  config = small_config()
  changes, _, found = plan_changes.fit(config, estimate(config, {}), {})
  assert found.fits and changes == {'model.remat': True, 'model.logits_chunk': 1024}


@pytest.mark.parametrize('rank', [0, 8])
def test_adapters_are_advised_where_nothing_else_would_do(monkeypatch, rank):
  config = small_config(lora__rank=rank)
  monkeypatch.setattr(memory, 'use_cpu_devices', lambda count: None)
  monkeypatch.setattr(plan, '_write', lambda *_: None)
  monkeypatch.setattr(memory, 'estimate', _estimate_by({'model.remat': (True, 15), 'lora.rank': (64, 30)}))
  out = io.StringIO()
  plan.plan(config, out)
  assert 'Nor with --config.model.remat=True: at least 0.0 GiB in the update.' in out.getvalue()
  advice = '--config.model.remat=True --config.lora.rank=64 --config.model.param_dtype=bfloat16'
  assert (advice in out.getvalue()) == (rank == 0)


def test_programs_with_adapters_are_others():
  config, keys = small_config(), set()
  for fields in ({}, {'lora.rank': 64}, ADAPTERS):
    config.update_from_flattened_dict(fields)
    keys |= {memory.shaped_by(config, phase, 16) for phase in ('update', 'rollout', 'evaluation')}
  assert len(keys) == 3 * 2  # as many rows in evaluation as in the rollout


@pytest.mark.slow
@pytest.mark.exhaustive
def test_the_command_needs_no_weights_and_tells_what_would_fit(tmp_path):
  """A shape alone, on a machine too small for the config: what is printed to be changed does make it fit."""
  (tmp_path / 'config.json').write_text(
    json.dumps({
      'architectures': ['Qwen2ForCausalLM'], 'vocab_size': 4096, 'hidden_size': 64, 'intermediate_size': 128,
      'num_hidden_layers': 1, 'num_attention_heads': 4, 'num_key_value_heads': 2, 'tie_word_embeddings': True,
    })
  )  # fmt: skip
  small = ['agent.max_context=256', 'train.groups=2', 'train.group_size=8', 'eval.groups=256', 'plan.prompt_tokens=64']
  command = [sys.executable, 'main.py', '--mode=plan', '--config=configs/frozenlake_ppo.py', '--config.plan.devices=2']
  command += [f'--config.{x}' for x in (*small, 'optimizer.mini_batch_size=16', 'optimizer.micro_batch_size=16')]
  command += [f'--config.model.path={tmp_path}', '--config.plan.memory_gb=0.04']

  def run(*flags):
    environment = os.environ | {'XLA_FLAGS': '--xla_force_host_platform_device_count=1'}  # not what the plan is for
    return subprocess.run([*command, *flags], cwd=ROOT, env=environment, capture_output=True, text=True, check=False)

  result = run()
  assert result.returncode == 0 and result.stderr.count('\n') == 2, result.stderr
  assert re.match(r'compiling programs .* takes minutes\nsearching for changes with which it fits; ', result.stderr)
  assert 'It does not fit' in result.stdout and 'on 2 devices of 0.04 GiB (data=2, fsdp=1, tensor=1)' in result.stdout
  advice = result.stdout.split('It would fit with\n')[1].split('\n')[0].split()
  assert advice and all(flag.startswith('--config.') for flag in advice)
  assert 'It fits' in result.stdout.split(advice[-1])[1]
  refused = run('--config.mesh.fsdp=3')
  assert refused.returncode == 2 and refused.stderr.startswith('error: mesh.data=-1, mesh.fsdp=3')


@pytest.mark.slow
def test_a_plan_that_fits_compiles_every_phase():
  """The built-in model's, with nothing in place of the compiler."""
  config, compiled = small_config(), {}
  found = memory.estimate(config, compiled)
  assert found.fits and all(kinds['activations'] > 0 for kinds in found.phases.values())
  assert len(compiled) == 2  # the update, and the rollout with as many rows as the evaluation
