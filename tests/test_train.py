"""The whole loop: it learns, it resumes to the last bit, it compiles few programs, and its gradients add up."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal

import jax
import numpy as np
import pytest
from flax import nnx
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboardX.proto.plugin_hparams_pb2 import HParamsPluginData

from ragen_jax import build, train
from ragen_jax.runs.metrics import read_metrics
from ragen_jax.training.learner import (
  Learner,
  LossConfig,
  TokenBatch,
  decayed,
  make_optimizer,
  plan_micro_batches,
  sampled_columns,
  score_tokens,
)
from ragen_jax.training.trainer import Trainer
from ragen_jax.utils.errors import UserError
from tests.support import builders
from tests.support.events import read_events
from tests.support.paths import ROOT

_NOT_COMPARED = ('timing_s/', 'perf/')


def _comparable(workdir):
  return [{name: x for name, x in line.items() if not name.startswith(_NOT_COMPARED)} for line in read_metrics(workdir)]


@pytest.mark.parametrize('estimator', ['gae', pytest.param('grpo', marks=pytest.mark.slow)])
def test_a_run_that_was_stopped_goes_on_as_if_it_had_not_been(tmp_path, estimator):
  fields = {'algorithm__adv_estimator': estimator, 'eval__greedy_too': False, 'eval__every': 1}
  config = builders.small_config(num_iterations=2, **fields)
  train.train_and_evaluate(config, str(tmp_path / 'whole'))
  stopped = builders.small_config(num_iterations=1, **fields)
  train.train_and_evaluate(stopped, str(tmp_path / 'parts'))
  train.train_and_evaluate(config, str(tmp_path / 'parts'))
  whole, parts = _comparable(tmp_path / 'whole'), _comparable(tmp_path / 'parts')
  assert [line['step'] for line in whole] == [0, 1, 2]
  assert whole == parts  # floats, to the last bit
  kept = [{p.name: p.read_bytes() for p in (tmp_path / run / 'episodes').iterdir()} for run in ('whole', 'parts')]
  assert kept[0] == kept[1] and sorted(kept[0]) == [
    'eval-00000000.jsonl.gz', 'eval-00000001.jsonl.gz', 'eval-00000002.jsonl.gz', 'train-00000001.jsonl.gz'
  ]  # fmt: skip
  assert whole[2]['actor/grad_norm'] > 0 and whole[1]['actor/pg_loss'] != whole[2]['actor/pg_loss']


def test_ctrl_c_saves_the_iteration_and_the_run_goes_on_as_if_nothing_had_been(tmp_path, monkeypatch, request):
  # Ignored where the tests themselves were started in the background.
  before = signal.signal(signal.SIGINT, signal.default_int_handler)
  request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
  config = builders.small_config(num_iterations=3, checkpoint__every=0, eval__every=0, eval__greedy_too=False)
  train.train_and_evaluate(config, str(tmp_path / 'whole'))
  update = Trainer.update

  def interrupted(self, *args):
    if args[4] == 1:  # the second iteration
      os.kill(os.getpid(), signal.SIGINT)
    return update(self, *args)

  monkeypatch.setattr(Trainer, 'update', interrupted)
  with pytest.raises(KeyboardInterrupt) as stopped:
    train.train_and_evaluate(config, str(tmp_path / 'parts'))
  assert stopped.value.status == 130
  monkeypatch.undo()
  assert [p.name for p in (tmp_path / 'parts' / 'checkpoints').iterdir()] == ['2']
  assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
  train.train_and_evaluate(config, str(tmp_path / 'parts'))
  assert _comparable(tmp_path / 'whole') == _comparable(tmp_path / 'parts')


def test_what_does_not_fit_into_the_context_is_told_before_anything_is_played(tmp_path, monkeypatch):
  monkeypatch.setattr(train.Evaluator, '__call__', lambda *_: pytest.fail('evaluated'))
  config = builders.small_config(train__tags=('Countdown',), agent__max_context=128)
  with pytest.raises(
    UserError, match=r'agent\.max_context=128: a first prompt of Countdown and its reply need \d+ \+ 32'
  ):
    train.train_and_evaluate(config, str(tmp_path))


@pytest.fixture(scope='module')
def finished_run(tmp_path_factory):
  """Config, workdir and last evaluation of a short run."""
  workdir = tmp_path_factory.mktemp('finished')
  config = builders.small_config(num_iterations=1)
  return config, workdir, train.train_and_evaluate(config, str(workdir))


def test_a_finished_run_started_again_changes_nothing(finished_run):
  config, workdir, first = finished_run
  lines = (workdir / 'metrics.jsonl').read_text()
  assert train.train_and_evaluate(config, str(workdir)) == first
  assert (workdir / 'metrics.jsonl').read_text() == lines


def test_a_run_leaves_its_episodes_for_people(finished_run, capsys):
  config, workdir, _ = finished_run
  page = workdir / 'trajectories.html'
  tags = {value.tag for event in read_events(workdir / 'tb') for value in event.summary.value}
  listed = json.loads(re.search(r'id="data">(.*?)</script>', page.read_text(), re.DOTALL)[1])['episodes']
  kept = [(e['step'], e['split']) for e in listed]
  # 16 held-out levels, sampled and greedy, before and after; 16 of 16 episodes of the one iteration.
  assert {x: kept.count(x) for x in kept} == {
    (0, 'val'): 16, (0, 'val-greedy'): 16, (1, 'val'): 16, (1, 'val-greedy'): 16, (1, 'train'): 16
  }  # fmt: skip
  levels = [{e['level'] for e in listed if (e['step'], e['split']) == x} for x in ((0, 'val'), (1, 'val'))]
  assert levels[0] == levels[1] and len(levels[0]) == config.eval.groups
  count = config.logging.trajectories
  for split in ('train', 'val'):
    assert len([tag for tag in tags if tag.startswith(f'{split}/boards/')]) == count
    assert len([tag for tag in tags if tag.startswith(f'{split}/generations/')]) == count
  page.unlink()
  train.train_and_evaluate(config, str(workdir))  # finished: shows its table again, and the page
  assert str(page) in capsys.readouterr().out and page.exists()


def test_tensorboard_has_all_there_is_to_see(finished_run):
  config, workdir, last = finished_run
  events = EventAccumulator(str(workdir / 'tb'), size_guidance={'scalars': 0}).Reload()
  tags = events.Tags()
  rows = read_metrics(workdir)
  assert set(tags['scalars']) == set().union(*rows) - {'step'}
  for name in ('actor/entropy', 'val-env/success', 'timing_s/gen', 'perf/throughput', 'perf/max_host_memory_gb'):
    shown = [(e.step, e.value) for e in events.Scalars(name)]
    assert shown == [(row['step'], np.float32(row[name])) for row in rows if name in row] and shown[0][1] > 0, name
  assert set(tags['histograms']) == {'actor/ratio', 'critic/advantages'}
  (ratios,) = (e.histogram_value for e in events.Histograms('actor/ratio'))
  (advantages,) = (e.histogram_value for e in events.Histograms('critic/advantages'))
  assert ratios.num == advantages.num > 100 and ratios.min < 1 < ratios.max
  assert len(tags['images']) == len([t for t in tags['tensors'] if t.endswith('/text_summary')]) > 0
  start, table = (
    HParamsPluginData.FromString(events.SummaryMetadata(f'_hparams_/{tag}').plugin_data.content)
    for tag in ('session_start_info', 'experiment')
  )
  columns = start.session_start_info.hparams
  assert columns['algorithm.clip_ratio_high'].number_value == config.algorithm.clip_ratio_high
  assert columns['envs.FrozenLake.max_turns'].number_value == config.envs.FrozenLake.max_turns
  assert not [name for name in columns if name.startswith(('envs.Sudoku', 'sft.'))]
  newest = {m.name.tag: events.Scalars(m.name.tag)[-1].value for m in table.build.metric_infos}
  assert newest == {
    name: np.float32(last[name])
    for name in ('val-env/success', 'val-env/FrozenLake/success', 'val-greedy/FrozenLake/success')
  }


def test_every_metric_and_file_of_a_run_is_explained(finished_run):
  _, workdir, _ = finished_run
  page = (ROOT / 'docs' / 'metrics.md').read_text()
  explained = set()
  for name in re.findall(r'`([^`\s]+)`', page):
    one_of = re.fullmatch(r'(.*)\{(.*)\}', name)
    explained |= {one_of[1] + x for x in one_of[2].split(',')} if one_of else {name}
  logged, metrics = set(), set().union(*read_metrics(workdir))
  for name in metrics:
    if name.removesuffix('_ema') in metrics - {name}:
      continue
    name = re.sub('pass@4|pass@1', 'pass@G', name.replace('FrozenLake', 'TAG'))
    logged |= {name} if name in explained else {re.sub('^(train|val-env|val-greedy)/TAG', 'TAG', name)}
  assert len(logged) > 40
  assert sorted(logged - explained) == []
  assert not {f'{p.name}/' * p.is_dir() or p.name for p in workdir.iterdir()} - explained - {'checkpoints/'}


def test_a_workdir_of_another_config_is_refused(tmp_path):
  train.record_config(str(tmp_path), builders.small_config().to_dict())
  (tmp_path / 'checkpoints' / '1').mkdir(parents=True)
  config = builders.small_config(algorithm__gamma=0.9, sft__steps=7, eval__step='best')  # the latter two are not read
  with pytest.raises(UserError, match=r'config: algorithm\.gamma was 1\.0 and is 0\.9; choose') as e:
    train.train_and_evaluate(config, str(tmp_path))
  assert '\n' not in str(e.value)


def test_training_lifts_success_on_the_bandit(tmp_path):
  """The arm that the model knows as the better one is the worse: from one right pull in eight to most."""
  config = builders.small_config(
    num_iterations=6,
    train__tags=('Bandit',),
    train__groups=32,
    train__group_size=8,
    envs__Bandit__arms=(('Dragon', 'Phoenix'),),
    envs__Bandit__high_probability=1.0,
    eval__tags=('Bandit',),
    eval__groups=64,
    eval__group_size=4,
    length_step=64,
    eval__temperature=1.0,
    eval__every=0,
    eval__greedy_too=False,
    optimizer__actor_lr=2e-4,
    optimizer__mini_batch_size=64,
    optimizer__micro_batch_size=64,
    checkpoint__every=0,
  )
  last = train.train_and_evaluate(config, str(tmp_path))
  first = read_metrics(tmp_path)[0]
  before, after = first['val-env/Bandit/success'], last['val-env/Bandit/success']
  assert before < 0.3 and after > 0.8  # 256 episodes: the standard error is at most 0.03


@pytest.mark.slow
def test_a_run_compiles_a_bounded_number_of_programs(tmp_path):
  config = builders.small_config(
    train__groups=16, train__group_size=4, optimizer__mini_batch_size=32, optimizer__micro_batch_size=16, length_step=64
  )
  policy = build.load_policy(config)
  trainer = Trainer(config, policy)
  params, opt_state, _ = trainer.init()
  widths = set()
  for i in range(5):
    rollout, selection = trainer.collect(params, i)
    batch, _ = trainer.make_batch(params, selection)
    params, opt_state, metrics = trainer.update(params, opt_state, batch, selection, i)
    widths.add(rollout.trajectory.tokens.shape[1])
    assert metrics['rollout/logprob_gap_max'] < 1e-3
  assert len(widths) > 1
  assert trainer.learner.traces <= 8
  assert policy.sampler.traces['decode'] <= 14


# -- the update against simpler ones -----------------------------------------------------------------------------------


def _random_batch(rng, rows=12, width=40, vocab=30):
  length = rng.integers(6, width + 1, size=rows)
  loss_mask = np.zeros((rows, width), bool)
  for r in range(rows):
    loss_mask[r, rng.choice(np.arange(1, length[r]), size=rng.integers(1, 6), replace=False)] = True
  columns, mask = sampled_columns(loss_mask)
  noise = lambda: np.where(mask, rng.normal(size=mask.shape), 0).astype(np.float32)  # noqa: E731
  batch = TokenBatch(
    tokens=rng.integers(0, vocab, size=(rows, width)).astype(np.int32),
    columns=columns,
    mask=mask,
    turn=np.zeros(mask.shape, np.int32),
    old_logprobs=noise() - 3,
    old_values=noise(),
    advantages=noise(),
    returns=noise(),
    weights=(mask / mask.sum()).astype(np.float32),
    value_weights=(mask / mask.sum()).astype(np.float32),
    ref_logprobs=noise() - 3,
    importance=np.ones(mask.shape, np.float32),
  )
  return batch, length, loss_mask


def _learner(model, **loss):
  optimizer = make_optimizer(
    actor_lr=1e-2, critic_lr=3e-2, warmup_steps=0, decay_steps=10, final_lr_fraction=1.0, b1=0.9, b2=0.999,
    weight_decay=0.0, grad_clip=1e9,
  )  # fmt: skip
  return Learner(nnx.split(model)[0], optimizer, LossConfig(**loss))


def test_sampled_columns_by_hand():
  mask = np.asarray([[0, 0, 1, 1, 0, 1], [0, 1, 0, 0, 0, 0], [0] * 6], bool)
  columns, present = sampled_columns(mask)
  assert columns.tolist() == [[2, 3, 5], [1, 1, 1], [1, 1, 1]]
  assert present.tolist() == [[True] * 3, [True, False, False], [False] * 3]


def test_micro_batches_cover_every_row_once_and_are_wide_enough():
  rng = np.random.default_rng(0)
  length, sampled = rng.integers(1, 200, size=50), rng.integers(0, 40, size=50)
  rows = rng.permutation(50)[:36]
  plans = plan_micro_batches(rows, length, sampled, size=8, length_step=32)
  taken = np.concatenate([p.rows[p.rows >= 0] for p in plans])
  assert sorted(taken.tolist()) == sorted(rows.tolist())
  for p in plans:
    own = p.rows[p.rows >= 0]
    assert len(p.rows) == 8 and p.width % 32 == 0 and p.replies % 16 == 0
    assert length[own].max() <= p.width < length[own].max() + 32 and sampled[own].max() <= p.replies


@pytest.mark.parametrize('size', [1, 5, 12])
def test_the_update_does_not_depend_on_micro_batches_chunks_or_remat(size):
  model = builders.random_model(30)
  batch, length, loss_mask = _random_batch(np.random.default_rng(0))
  results = []
  # Of micro-batches of one row each width is a program of its own.
  for micro, step, loss in ((12, 40, {}), (size, 20 if size == 1 else 8, {'logits_chunk': 7, 'remat': True})):
    learner = _learner(model, **loss)
    params = jax.tree.map(np.array, nnx.split(model)[1])
    plans = plan_micro_batches(
      np.arange(12, dtype=np.int32), length, loss_mask.sum(axis=1), size=micro, length_step=step
    )
    new, _, metrics = learner.step(params, learner.optimizer.init(params), batch, plans)
    results.append((jax.device_get(new), jax.device_get(metrics)))
  (whole, whole_metrics), (parts, parts_metrics) = results
  for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(parts), strict=True):
    np.testing.assert_allclose(a, b, atol=3e-5)
  for name, x in whole_metrics.items():
    np.testing.assert_allclose(x, parts_metrics[name], rtol=1e-4, atol=1e-5, err_msg=name)


def test_the_gradient_is_that_of_the_loss_written_out_in_numpy():
  """PPO with dual and value clip, entropy bonus: directional derivatives by finite differences of a NumPy loss."""
  model = builders.random_model(30)
  batch, length, loss_mask = _random_batch(np.random.default_rng(1))
  cfg = LossConfig(temperature=1.3, clip_ratio_low=0.2, clip_ratio_high=0.3, entropy_coef=0.05, value_coef=0.7)
  graphdef, params = nnx.split(model)

  def numpy_loss(params):
    logprobs, entropies, values = (
      np.asarray(x, np.float64) for x in score_tokens(nnx.merge(graphdef, params), batch.tokens, batch.columns, cfg)
    )
    total = 0.0
    n = batch.mask.sum()
    for b, r in zip(*np.nonzero(batch.mask), strict=True):
      a, ratio = float(batch.advantages[b, r]), np.exp(logprobs[b, r] - batch.old_logprobs[b, r])
      surrogate = max(-a * ratio, -a * min(max(ratio, 0.8), 1.3))
      if a < 0:
        surrogate = min(surrogate, -3.0 * a)
      v, old, ret = values[b, r], float(batch.old_values[b, r]), float(batch.returns[b, r])
      clipped = old + min(max(v - old, -0.5), 0.5)
      value = 0.5 * max((v - ret) ** 2, (clipped - ret) ** 2)
      total += (surrogate - 0.05 * entropies[b, r] + 0.7 * value) / n
    return total

  captured = {}
  learner = _learner(model, **dataclasses.asdict(cfg))
  learner._apply = lambda p, o, g, _: (captured.update(g=g) or p, o, {})
  plans = plan_micro_batches(np.arange(12, dtype=np.int32), length, loss_mask.sum(axis=1), size=12, length_step=40)
  learner.step(params, None, batch, plans)
  leaves, tree = jax.tree.flatten(params)
  gradients = jax.tree.leaves(captured['g'])
  for trial in range(4):
    rng = np.random.default_rng(trial)
    direction = [rng.normal(size=x.shape).astype(np.float32) for x in leaves]
    exact = sum(float(np.sum(np.asarray(g, np.float64) * d)) for g, d in zip(gradients, direction, strict=True))
    norm = np.sqrt(sum(float(np.sum(np.asarray(g, np.float64) ** 2)) for g in gradients))
    step = 2e-4
    up, down = (
      numpy_loss(jax.tree.unflatten(tree, [x + s * step * d for x, d in zip(leaves, direction, strict=True)]))
      for s in (1, -1)
    )
    np.testing.assert_allclose((up - down) / (2 * step), exact, rtol=0.02, atol=0.02 * norm)


def test_the_value_head_has_its_own_learning_rate():
  model = builders.random_model(30)
  batch, length, loss_mask = _random_batch(np.random.default_rng(2))
  learner = _learner(model)
  before = jax.tree.map(np.array, nnx.split(model)[1])
  plans = plan_micro_batches(np.arange(12, dtype=np.int32), length, loss_mask.sum(axis=1), size=12, length_step=40)
  after, _, _ = learner.step(jax.tree.map(np.array, before), learner.optimizer.init(before), batch, plans)
  # Adam's first step moves every weight by its learning rate.
  moved = lambda path: np.abs(  # noqa: E731
    np.asarray(nnx.to_pure_dict(after)[path[0]][path[1]]) - np.asarray(nnx.to_pure_dict(before)[path[0]][path[1]])
  )
  np.testing.assert_allclose(moved(('value_head', 'kernel')), 3e-2, rtol=1e-2)
  np.testing.assert_allclose(np.median(moved(('policy', 'embed_tokens'))[batch.tokens[0, 1]]), 1e-2, rtol=1e-2)


def test_weight_decay_spares_norms_and_biases():
  mask = nnx.to_pure_dict(decayed(nnx.split(builders.random_model(30))[1]))
  attention = mask['policy']['layers'][0]['self_attn']
  assert attention['k_proj'] == {'kernel': True, 'bias': False}
  assert mask['policy']['embed_tokens'] and not mask['policy']['norm']['weight']
  assert mask['value_head'] == {'kernel': False, 'bias': False}
