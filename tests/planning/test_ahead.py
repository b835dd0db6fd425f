"""Programs compiled ahead of a run: the run's own calls take them, and compile nothing."""

from __future__ import annotations

import contextlib
import logging
import types

import jax
import numpy as np
import pytest
from flax import nnx

from ragen_jax import build
from ragen_jax.planning import abstract, ahead, program_list
from ragen_jax.utils import alike
from ragen_jax.utils.background import Background
from tests.support.compilations import compiled
from tests.support.configs import small_config
from tests.support.models import EXPERTS, random_policy

_LONG = 300.0  # seconds
# One size of the cache, and one way to sample.
_SMALL = {
  'length_step': 512, 'agent__max_context': 300, 'agent__max_response_tokens': 8, 'agent__decode_chunk': 8,
  'agent__drop_finished': False, 'agent__schedule': 'continuous', 'optimizer__packing': True,
  'eval__greedy_too': False, 'compile_ahead': 1,
}  # fmt: skip
# What is compiled for them: functions of `Sampler`, `Learner` and `Scorer`.
_FUNCTIONS = {'_extend_rows', '_decode_rows', '_resize_layer', 'program', '_apply', 'score', 'logprobs', 'values'}


def _parts(directory, **fields):
  config = small_config(**_SMALL | fields)
  policy = random_policy(config, directory)
  trainer = build.make_trainer(config, policy)
  return config, trainer


@pytest.fixture(scope='module', params=[512, pytest.param(128, marks=pytest.mark.slow)])
def played(request, tmp_path_factory):
  """A run after its first rollout, with one or two sizes of the cache: its parts, and what was compiled ahead."""
  alike.forget()  # nothing is compiled yet
  config, trainer = _parts(tmp_path_factory.mktemp('model'), length_step=request.param)
  state = trainer.init()
  with contextlib.closing(Background(1)) as background:
    with ahead.open_ahead(config, trainer, state, background):
      _, selection = trainer.collect(state)
      assert background.wait(_LONG)
    done = [program for program in background.done if program[0] != 'plan']
    yield config, trainer, state, selection, done, background


def _traces(trainer):
  return dict(trainer.model.sampler.traces), trainer.learner.traces, dict(trainer.scorer.traces)


@pytest.mark.slow
@pytest.mark.exhaustive_cases('128')
def test_what_a_rollout_makes_likely_is_compiled_and_listed(played):
  config, trainer, _, _, done, background = played
  listed = program_list.programs(config, trainer, program_list.rows(config, trainer.model.sampler))
  assert {'extend', 'gradient', 'apply'} <= {name for name, _ in done} <= {name for name, _ in listed}
  assert ('resize' in dict(done)) == (config.length_step == 128)
  run = set(background._needed)
  assert set(done) | run <= set(listed)
  assert len(set(done)) == len(done)


@pytest.mark.slow
@pytest.mark.exhaustive_cases('128')
def test_an_update_compiles_nothing(played):
  _, trainer, state, selection, _, _ = played
  batch, _ = trainer.estimate(state, selection)
  before = _traces(trainer)
  rows = np.flatnonzero(selection.keep)[:8]
  with compiled() as found:
    parts = trainer.micro_batches(batch, selection, rows)
    copied = jax.tree.map(lambda x: x.copy(), state)
    trainer.learner.step(copied, parts)
  assert _traces(trainer) == before and not _FUNCTIONS & set(found)


@pytest.mark.slow
def test_the_programs_of_other_caches_serve_the_sampler(played):
  """Every program that was compiled for the sampler is called as `SamplerSpeaker` does."""
  config, trainer, state, _, done, _ = played
  sampler = trainer.model.sampler
  weights, before = nnx.to_pure_dict(sampler.decode_weights(state.params)), _traces(trainer)
  called = 0
  for name, (every, *rest) in (program for program in done if program[0] in ('extend', 'decode', 'resize')):
    rows = sampler.init(every, rest[0] if name == 'resize' else rest[1])
    with compiled() as found:
      if name == 'resize':
        sampler.resize(rows, rest[1])
      else:
        part = rest[0]
        selected = None if part == every else np.arange(part, dtype=np.int32)
        if name == 'extend':
          tokens = np.zeros((part, rest[2]), np.int32)
          sampler.extend(weights, rows, tokens, np.ones(part, np.int32), rows=selected)
        else:
          keys, budget = jax.random.split(jax.random.key(0), part), np.full(part, 2, np.int32)
          sampling = build.sampling(config.train)
          sampler.decode(
            weights, rows, keys, budget, columns=config.agent.decode_chunk, sampling=sampling, rows=selected, enough=1
          )
    assert not _FUNCTIONS & set(found), (name, every, rest)
    called += 1
  assert called >= 2 and _traces(trainer) == before


def test_without_threads_the_number_is_told_and_nothing_observed(tmp_path, caplog):
  config, trainer = _parts(tmp_path)
  background = Background(0)
  listed = program_list.programs(config, trainer, program_list.rows(config, trainer.model.sampler))
  with caplog.at_level(logging.INFO), ahead.open_ahead(config, trainer, None, background):
    assert not trainer.model.sampler.observer._listeners
  told = [r.getMessage() for r in caplog.records if r.getMessage().startswith('programs: at most')]
  assert len(told) == 1 and told[0].startswith(f'programs: {program_list.describe(listed, images=False)}; ')
  assert told[0].endswith('each compiled when it is needed first')


def test_open_it_observes_and_closed_it_does_not(tmp_path, caplog):
  config, trainer = _parts(tmp_path)
  background, observer = Background(1), trainer.model.sampler.observer
  with caplog.at_level(logging.INFO), ahead.open_ahead(config, trainer, _state(trainer), background):
    assert len(observer._listeners) == 1
  assert any('compiled in 1 threads before' in r.getMessage() for r in caplog.records)
  assert not observer._listeners
  background.want([('late', lambda: None)], urgency=0)
  background.close()
  assert not background.done and not any(thread.is_alive() for thread in background._threads)


@pytest.mark.parametrize(
  ('images', 'most', 'told'),
  [(7, 10**5, 'other programs with images;'), (0, 1, 'shapes of micro-batches after the first 1,')],
)
def test_the_log_names_what_it_does_not_count(tmp_path, caplog, monkeypatch, images, most, told):
  config, trainer = _parts(tmp_path)
  monkeypatch.setattr(ahead, 'visual_columns', lambda config: images)
  monkeypatch.setattr(program_list, '_MOST', most)
  with caplog.at_level(logging.INFO), ahead.open_ahead(config, trainer, None, Background(0)):
    pass
  (line,) = (r.getMessage() for r in caplog.records if r.getMessage().startswith('programs: '))
  assert f'not counting {told[:-1]}' in line and 'at most' not in line


def test_in_the_last_iteration_nothing_is_planned(tmp_path):
  config, trainer = _parts(tmp_path, num_iterations=2)
  background = types.SimpleNamespace(threads=1, wanted=[], stop=lambda: None)
  background.want = lambda programs, urgency: background.wanted.extend(programs)
  rollout = types.SimpleNamespace(
    trajectory=types.SimpleNamespace(
      length=np.ones(2), loss_mask=np.ones((2, 1)), episode=np.arange(2), tokens=np.zeros((2, 1), np.int32), image=None
    )
  )
  with ahead.open_ahead(config, trainer, _state(trainer), background):
    trainer.model.sampler.observer.played(rollout, 1)
    assert len(background.wanted) == 1
    trainer.model.sampler.observer.played(rollout, 2)
    assert len(background.wanted) == 1


def test_a_rollout_asks_for_the_caches_of_longer_replies_and_the_first_update_for_far_lengths(tmp_path):
  config, trainer = _parts(tmp_path, length_step=64)
  observer = trainer.model.sampler.observer
  background = types.SimpleNamespace(threads=1, wanted=[], stop=lambda: None, need=lambda key: True)
  background.want = lambda programs, urgency: background.wanted.extend(programs)
  small, *_, large = abstract.sampler_shapes(config, 16, 1).caches

  def wanted():
    keys = [key for key, _ in background.wanted]
    (job,) = [job for (name, *_), job in background.wanted if name == 'plan']
    return {key[1][2] for key in keys if key[0] == 'extend'}, len(job.args[3])

  with ahead.open_ahead(config, trainer, _state(trainer), background):
    observer.runs('extend', (16, 4, small, 64), None)
    assert {key[1][2] for key, _ in background.wanted if key[0] == 'extend'} < {small, large, 192}
    background.wanted.clear()
    for length, gradient in ((20, False), (large, True)):
      rollout = types.SimpleNamespace(
        trajectory=types.SimpleNamespace(
          length=np.full(2, length),
          loss_mask=np.ones((2, 1), bool),
          episode=np.arange(2),
          tokens=np.arange(2, dtype=np.int32)[:, None],
          image=None,
        )
      )
      if gradient:
        observer.runs('gradient', (2, 64, 8))
      observer.played(rollout, 1)
      sizes, factors = wanted()
      assert max(sizes) == (large if gradient else small) and factors == (4 if gradient else 3)
      background.wanted.clear()


def test_only_listed_programs_are_planned_and_an_optimiser_step_for_each_gradient(tmp_path):
  config, trainer = _parts(tmp_path, optimizer__critic_warmup=1, num_iterations=2)
  background = types.SimpleNamespace(wanted=[])
  background.want = lambda programs, urgency: background.wanted.extend(name for name, _ in programs)
  listed = program_list.programs(config, trainer, program_list.rows(config, trainer.model.sampler))
  lengths = np.full(16, 200), np.full(16, 20), 16, program_list.FACTORS, None
  steps = {('apply', ()), ('apply_critic', ())}
  ahead.CompileAhead(config, trainer, _state(trainer), listed, background)._plan(*lengths)
  assert steps < set(background.wanted) <= set(listed)
  background.wanted.clear()
  ahead.CompileAhead(config, trainer, _state(trainer), [], background)._plan(*lengths)
  assert set(background.wanted) == steps


@pytest.mark.parametrize('name', ['gradient', 'gradient_critic'])
def test_the_gradient_of_the_critic_alone_is_another_program(tmp_path, monkeypatch, name):
  config, trainer = _parts(tmp_path, optimizer__critic_warmup=1, num_iterations=2)
  asked = []

  def lower(learner, state, batch, *, critic_only):
    asked.append(critic_only)
    return types.SimpleNamespace(compile=lambda: None)

  def step_programs(learner, state, batch, *, critic_only):
    lowered = types.SimpleNamespace(compile=lambda: asked.append('compiled'))
    return [types.SimpleNamespace(lower=lambda: asked.append(critic_only) or lowered) for _ in range(2)]

  open_ahead = ahead.CompileAhead(config, trainer, _state(trainer), [], types.SimpleNamespace())
  monkeypatch.setattr(ahead, 'lower_gradient', lower)
  monkeypatch.setattr(ahead, 'step_programs', step_programs)
  open_ahead._compile(name, program_list.batch_shapes(config, trainer)[0])
  assert asked == [name == 'gradient_critic']
  asked.clear()
  open_ahead._compile_step(name, program_list.batch_shapes(config, trainer)[0])
  assert asked == [name == 'gradient_critic', 'compiled'] * 2


@pytest.mark.parametrize(('name', 'replays'), [('score', True), ('logprobs', False)])
@pytest.mark.slow_cases('score-True')
def test_programs_that_replay_experts_are_compiled_with_them_and_others_without(tmp_path, monkeypatch, name, replays):
  config = small_config(**_SMALL, algorithm__replay_experts=True)
  config.model.path = random_policy(config, tmp_path, **EXPERTS).directory
  trainer, asked = build.make_trainer(config, build.load_policy(config)), []

  def lower(scorer, params, batch, of):
    asked.append((of, batch.experts is not None))
    return types.SimpleNamespace(compile=lambda: None)

  monkeypatch.setattr(ahead, 'lower_score', lower)
  open_ahead = ahead.CompileAhead(config, trainer, _state(trainer), [], types.SimpleNamespace())
  open_ahead._compile(name, program_list.batch_shapes(config, trainer)[0])
  assert asked == [(name, replays)]


def _state(trainer):
  return jax.eval_shape(trainer.init).replace(lr_scale=1.0)


@pytest.mark.parametrize(
  ('setting', 'platform', 'processes', 'processors', 'expected'),
  [(3, 'cpu', 1, 2, 3), (3, 'tpu', 2, 64, 0),
   (0, 'tpu', 1, 64, 0), (-1, 'cpu', 1, 64, 0), (-1, 'tpu', 1, 64, 4), (-1, 'gpu', 1, 8, 2),
   (-1, 'tpu', 1, 2, 1), (-1, 'tpu', 2, 64, 0)],
)  # fmt: skip
def test_threads_follow_from_the_machine(monkeypatch, setting, platform, processes, processors, expected):
  monkeypatch.setattr(ahead.os, 'cpu_count', lambda: processors)
  config = small_config(compile_ahead=setting)
  assert ahead.threads(config, platform=platform, processes=processes) == expected
  monkeypatch.setattr(ahead, 'visual_columns', lambda config: 7)
  assert ahead.threads(config, platform=platform, processes=processes) == 0
