"""`--mode=eval`: a checkpoint, and who else is asked to, on fixed levels, with 95 % intervals.

All play the same levels with the same luck and limits. What comes out of it:

  <workdir>/evaluation/<name>.json    every number
  <workdir>/evaluation/<name>/        episodes to look at, and the page that shows them
  <workdir>/tb/evaluation/            the numbers at the checkpoint's step, for TensorBoard
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import os
import pathlib
import sys
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from ragen_jax import build
from ragen_jax.agent.chat import ChatTokenizer
from ragen_jax.agent.endpoint_client import EndpointPolicy
from ragen_jax.agent.env_manager import EnvGroup, EnvStateManager
from ragen_jax.agent.text_policy import RandomPolicy, SolverPolicy, TextPolicy, play
from ragen_jax.agent.trajectory import Episode
from ragen_jax.config.checks import check_config, check_eval
from ragen_jax.envs import TextEnvironment
from ragen_jax.evaluation.evaluator import Evaluator
from ragen_jax.evaluation.intervals import Interval, level_intervals, sizes_of_k
from ragen_jax.models import presets
from ragen_jax.modes.export import choose_step, restore_params
from ragen_jax.runs.checkpoints import Checkpointer
from ragen_jax.runs.config_fields import fields_of
from ragen_jax.runs.metrics import write_events
from ragen_jax.runs.progress import table
from ragen_jax.runs.workdir import changed_fields
from ragen_jax.train import BEST, use_compilation_cache
from ragen_jax.utils.errors import UserError
from ragen_jax.viewer.page import write_page
from ragen_jax.viewer.records import first_rows, text_records
from ragen_jax.viewer.store import EpisodeWriter

_log = logging.getLogger(__name__)

VERSION = 1
_COLUMN = 15  # characters at most: with five of them, a table has up to 100

# What the table shows, of what there is.
_LABELS = {
  'success': 'success',
  'fraction_of_optimal': 'of the best',
  'pass@': 'pass@',
  'episodic_return': 'reward',
  'score': 'with penalty',
  'num_turns': 'turns',
  'num_actions': 'actions',
  'action_is_valid': 'valid replies',
  'truncated': 'cut off',
  'response_length': 'reply tokens',
  'no_reply': 'no reply',
  'env_errors': 'env errors',
}


@dataclasses.dataclass
class Row:
  """One policy on one environment.

  Attributes:
    policy: its name.
    kind: 'model', 'random', 'solver' or 'endpoint'.
    tag: the environment.
    sampling: how it draws tokens; empty where it draws none.
    levels: how many.
    episodes: how many, on all of them.
    metrics: by name, see `level_intervals`.
  """

  policy: str
  kind: str
  tag: str
  sampling: str
  levels: int
  episodes: int
  metrics: dict[str, Interval]

  def to_json(self) -> dict[str, Any]:
    """As JSON, which has no NaN."""
    numbers = {
      name: {end: x if math.isfinite(x) else None for end, x in dataclasses.asdict(interval).items()}
      for name, interval in self.metrics.items()
    }
    return dataclasses.asdict(self) | {'metrics': numbers}


@dataclasses.dataclass
class _Levels:
  """The levels of one environment.

  Attributes:
    spec: the environment.
    first: seed of the first level.
    envs: plays them, for policies that speak text.
    best: f32[levels], the best success possible on each; None where it is not known.
  """

  spec: EnvGroup
  first: int
  envs: EnvStateManager
  best: np.ndarray | None


def evaluate(config: ConfigDict, workdir: str, *, given: bool = False) -> dict[str, Any]:
  """Evaluates what `config.eval` names, and writes it down.

  Args:
    config: see configs/default.py. Of a run's checkpoint only the fields that say what its weights are must be the
      run's own.
    workdir: the run's, or where the numbers go of a model without one.
    given: the user named the workdir; a wrong name must not pass for a run that has no checkpoint yet.

  Returns:
    What is written as JSON, with the path as 'path'.

  Raises:
    UserError: the config cannot be run, there is no such checkpoint, or it is another config's; the endpoint cannot be
      reached; something cannot be written.
  """
  if jax.process_count() > 1:
    raise UserError(f'--mode=eval runs in one process, there are {jax.process_count()}; devices may be many')
  check_eval(config)
  check_config(config)
  with Checkpointer(workdir, save_best=BEST) as checkpointer:
    step = _find_step(config, workdir, checkpointer, given)
    warm_start = step is not None and 'data' in checkpointer.meta(step)
    trained_on = [] if step is None else _compare_with_run(config, workdir, warm_start=warm_start)
    head = _head(config, step, trained_on)
    directory = _make(pathlib.Path(workdir) / 'evaluation')
    use_compilation_cache(config, workdir)
    rows, records = _play_all(config, checkpointer, step)
  name = _free_name(directory, head, config)  # another evaluation may have ended meanwhile
  found = head | {'rows': [row.to_json() for row in rows]}
  path = directory / f'{name}.json'
  _write_json(path, found)
  EpisodeWriter(directory / name).write('eval', step or 0, records)
  page = write_page(directory / name)
  _write_events(workdir, name, step or 0, rows)
  _tell(config, step, workdir, rows, [str(path), *([page] if page else [])])
  return found | {'path': str(path)}


def _find_step(config: ConfigDict, workdir: str, checkpointer: Checkpointer, given: bool) -> int | None:
  """The checkpoint to evaluate; None where it is none of the workdir's.

  Raises:
    UserError: there is none, though one was meant.
  """
  if config.eval.step in ('base', 'none'):
    return None
  if checkpointer.steps():
    return choose_step(checkpointer, config.eval.step, 'eval.step')
  is_run = os.path.exists(os.path.join(workdir, 'config.json'))
  named = config.model.path or config.lora.path
  if config.eval.step != 'latest' or is_run or (given and not named):
    raise UserError(
      f'--workdir={workdir}: there is no checkpoint in it; --config.eval.step=base evaluates the model '
      f'{_model_name(config)} as it is'
    )
  _log.info('there is no checkpoint in %s: %s is evaluated as it is', workdir, _model_name(config))
  return None


def _compare_with_run(config: ConfigDict, workdir: str, *, warm_start: bool = False) -> list[str]:
  """The tags that the run, or warm start, trains on.

  Raises:
    UserError: its weights are not of the model that the config names.
  """
  run, changed = changed_fields(workdir, config.to_dict())
  weights = fields_of('weights')
  others = [f'{name} was {was} and is {now}' for name, (was, now) in changed.items() if name in weights]
  if others:
    raise UserError(
      f'workdir {workdir} has checkpoints of another model: {"; ".join(others)}; set these fields back, '
      'or evaluate the model as it is with --config.eval.step=base'
    )
  tags = tuple(f'envs.{tag}.' for tag in config.eval.tags)
  for name, (was, now) in changed.items():
    if name.startswith(('agent.', *tags)) and was != 'absent':
      _log.info('not as in training: %s was %s and is %s', name, was, now)
  if not warm_start:
    return list(run['train']['tags'])
  if run['sft']['from_scratch']:
    raise UserError(
      f'--workdir={workdir}: a model from scratch has a tokenizer of its own; evaluate what was written, with '
      f'--config.model.path={run["sft"]["output"]} --config.eval.step=base'
    )
  return [] if run['sft']['data'] else list(run['sft']['tags'])


def _model_name(config: ConfigDict) -> str:
  model = config.model.path or config.model.preset
  return f'{model} with {config.lora.path}' if config.lora.path else model


def _head(config: ConfigDict, step: int | None, trained_on: list[str]) -> dict[str, Any]:
  """What identifies an evaluation: all of its JSON but the rows."""
  head = {
    'version': VERSION,
    'model': '' if config.eval.step == 'none' else _model_name(config),
    'checkpoint': step,
    'trained_on': trained_on,
    'seed': config.seed,
    'eval': config.eval.to_dict(),
    'agent': config.agent.to_dict(),
    'envs': {tag: config.envs[tag].to_dict() for tag in config.eval.tags},
  }
  return json.loads(json.dumps(head))


def _free_name(directory: pathlib.Path, head: dict[str, Any], config: ConfigDict) -> str:
  """A name that no other evaluation has; the same one again is written over."""
  tags = config.eval.tags
  what = 'baselines' if config.eval.step == 'none' else 'base'
  what = what if head['checkpoint'] is None else f'step_{head["checkpoint"]}'
  name = '_'.join([what, *(tags if len(tags) <= 3 else [*tags[:2], f'and_{len(tags) - 2}_more'])])
  number, tried = 1, name
  while (path := directory / f'{tried}.json').exists():
    try:
      old = json.loads(path.read_text())
      if {key: x for key, x in old.items() if key != 'rows'} == head:
        break
    except (OSError, ValueError, AttributeError):
      pass  # not ours, or damaged: left as it is
    number += 1
    tried = f'{name}_{number}'
  return tried


def _play_all(
  config: ConfigDict, checkpointer: Checkpointer, step: int | None
) -> tuple[list[Row], list[dict[str, Any]]]:
  """Lets everybody play; the rows in the table's order, and records of some episodes."""
  e = config.eval
  tokenizer = ChatTokenizer(presets.resolve(config.model.preset, config.model.path))
  specs = build.env_groups(config, tuple(e.tags), build.group_counts(e, 'eval'), field='eval.tags')
  levels = list(_levels(config, specs))
  others, records = [], []
  endpoint = _endpoint(config) if e.endpoint else None
  # Before anybody plays: a run that goes on may delete the checkpoint meanwhile.
  model = _load_model(config, checkpointer, step) if e.step != 'none' else None
  # The endpoint first: that it cannot be reached is known before programs are compiled.
  for kind in [*(['endpoint'] if endpoint else []), *e.baselines]:
    for part in levels:
      row, own = _play_text(config, kind, part, tokenizer, endpoint, step or 0)
      others += row
      records += own
    if kind == 'endpoint' and endpoint.lost:
      lost = ', '.join(f'{count} x {reason}' for reason, count in endpoint.lost.most_common(3))
      _log.warning('%d of the %d replies of %s never came: %s', endpoint.lost.total(), endpoint.asked, e.endpoint, lost)
  models = []
  if model is not None:
    models, own = _play_model(config, *model, step, levels)
    records = own + records
  order = {'random': 1, 'solver': 2, 'endpoint': 3}
  rows = models + sorted(others, key=lambda row: order[row.kind])
  return [row for tag in e.tags for row in rows if row.tag == tag], records


def _levels(config: ConfigDict, specs: list[EnvGroup]) -> Iterator[_Levels]:
  """The levels of each environment, with the seeds that they have in a batch of all."""
  first = config.eval.first_level
  for spec in specs:
    envs, best = EnvStateManager([spec], config.eval.group_size), None
    if not isinstance(spec.env, TextEnvironment):
      envs.reset(first)
      try:
        best = envs.optimal()[:: config.eval.group_size]
      except ValueError as e:  # the solver cannot do a game or a budget of this size
        _log.warning('envs.%s: the best possible success is not known (%s)', spec.tag, e)
    yield _Levels(spec, first, envs, None if best is None or np.isnan(best).any() else best)
    first += spec.groups


def _load_model(config: ConfigDict, checkpointer: Checkpointer, step: int | None) -> tuple[build.Policy, Any]:
  policy = build.load_policy(config)
  return policy, build.param_state(policy.model) if step is None else restore_params(checkpointer, policy, step)


def _play_model(
  config: ConfigDict, policy: build.Policy, params: Any, step: int | None, levels: list[_Levels]
) -> tuple[list[Row], list[dict[str, Any]]]:
  config = config.copy_and_resolve_references()
  if config.eval.temperature == 0:
    config.eval.greedy_too = False  # it would be the same again
  name = f'checkpoint {step}' if step is not None else f'model {_model_name(config)}'
  _log.info('%s: %s', name, policy.describe())
  sampled, greedy, records = Evaluator(config, policy).episodes(params, step or 0)
  rows = [_row(config, name, 'model', part, _sampling(config), sampled) for part in levels]
  if greedy:
    rows += [_row(config, name, 'model', part, 'greedy', greedy) for part in levels]
  return rows, records


def _endpoint(config: ConfigDict) -> EndpointPolicy:
  e = config.eval
  return EndpointPolicy(
    e.endpoint,
    e.endpoint_model,
    build.sampling(e),
    max_tokens=e.endpoint_max_tokens,
    timeout_s=e.endpoint_timeout,
    workers=e.endpoint_workers,
    tries=e.endpoint_tries,
  )


def _play_text(
  config: ConfigDict,
  kind: str,
  levels: _Levels,
  tokenizer: ChatTokenizer,
  endpoint: EndpointPolicy | None,
  step: int,
) -> tuple[list[Row], list[dict[str, Any]]]:
  """A text policy on one environment; nothing where it cannot play."""
  e, spec = config.eval, levels.spec
  context = build.context_manager(config, tokenizer, [spec])
  policy: TextPolicy
  if kind == 'random':
    if not RandomPolicy.can_play(spec.env):
      _log.info('%s: actions are free text, so nobody plays at random', spec.tag)
      return [], []
    policy = RandomPolicy(context, np.random.default_rng(levels.first))
  elif kind == 'solver':
    if not spec.env.has_solver:
      _log.info('%s: has no solver', spec.tag)
      return [], []
    policy = SolverPolicy(context)
  else:
    policy = endpoint
  shown = first_rows([spec], e.group_size, config.logging.episodes, one_a_level=True)
  try:
    played = play(
      levels.envs, context, policy, levels.first, format_penalty=config.agent.format_penalty, pictured=shown
    )
  except ValueError as error:
    if kind != 'solver':
      raise
    _log.info('%s: the solver is left out (%s)', spec.tag, error)
    return [], []
  name, sampling = (f'endpoint {e.endpoint_model}', _sampling(config)) if kind == 'endpoint' else (kind, '')
  whole = config.agent.context == 'full'
  records = text_records(played, step=step, split=kind, group_size=e.group_size, tokenizer=tokenizer, whole=whole)
  return [_row(config, name, kind, levels, sampling, played.episodes)], records


def _sampling(config: ConfigDict) -> str:
  """'temperature 0.5', 'greedy', 'temperature 1, top-p 0.9'."""
  e = config.eval
  if e.temperature == 0:
    return 'greedy'
  parts = [f'temperature {e.temperature:g}']
  parts += [f'top-p {e.top_p:g}'] if e.top_p < 1 else []
  parts += [f'top-k {e.top_k}'] if e.top_k else []
  return ', '.join(parts)


def _row(config: ConfigDict, policy: str, kind: str, levels: _Levels, sampling: str, episodes: list[Episode]) -> Row:
  own, size = [e for e in episodes if e.tag == levels.spec.tag], config.eval.group_size
  metrics = level_intervals(own, size, levels.best, network=kind == 'endpoint')
  return Row(policy, kind, levels.spec.tag, sampling, len(own) // size, len(own), metrics)


def _make(directory: pathlib.Path) -> pathlib.Path:
  """Makes the directory before the work is done that goes into it."""
  try:
    directory.mkdir(parents=True, exist_ok=True)
  except OSError as e:
    raise UserError(f'--workdir: {directory} cannot be made: {e.strerror or e}') from e
  return directory


def _write_json(path: pathlib.Path, found: dict[str, Any]) -> None:
  temporary = path.with_name(f'{path.name}.tmp')
  try:
    temporary.write_text(json.dumps(found, indent=1, allow_nan=False) + '\n')
    os.replace(temporary, path)
  except OSError as e:
    raise UserError(f'{path} was not written: {e.strerror or e}') from e


def _write_events(workdir: str, name: str, step: int, rows: list[Row]) -> None:
  """A TensorBoard run for each kind of policy, so that they share their charts."""
  runs: dict[str, dict[str, float]] = {}
  for row in rows:
    run = ('greedy' if row.sampling == 'greedy' else 'sampled') if row.kind == 'model' else row.kind
    for metric, interval in row.metrics.items():
      ends = {'': interval.mean, '/low': interval.low, '/high': interval.high}
      own = {f'eval/{row.tag}/{metric}{end}': x for end, x in ends.items() if math.isfinite(x)}
      runs.setdefault(run, {}).update(own)
  for run, scalars in runs.items():
    write_events(os.path.join(workdir, 'tb', 'evaluation', run), name, step, scalars)


def tables(rows: list[Row], group_size: int) -> list[str]:
  """One table for each environment, a column for each policy; at most 100 characters wide."""
  out = []
  for tag in dict.fromkeys(row.tag for row in rows):
    own = [row for row in rows if row.tag == tag]
    best = own[0].metrics.get('optimal')
    possible = f', best possible success {best.mean:.3f}' if best else ''
    title = f'{tag}: {own[0].levels} levels, {group_size} episode{"s" * (group_size > 1)} each{possible}'
    names = []
    for metric in _LABELS:
      each = [f'pass@{k}' for k in sizes_of_k(group_size)[1:]] if metric == 'pass@' else [metric]
      names += [(m, m if metric == 'pass@' else _LABELS[m]) for m in each if any(m in row.metrics for row in own)]
    cells = [[label, *(_cell(row.metrics.get(name)) for row in own)] for name, label in names]
    header = ['', *(_short(_column(row)) for row in own)]
    out.append(table([['', *(_short(row.sampling) for row in own)], *cells], title, header=header))
  return out


def _column(row: Row) -> str:
  """A policy's name at the head of a column; a model without a checkpoint is named above all tables."""
  if row.kind == 'model' and not row.policy.startswith('checkpoint'):
    return 'model'
  return row.policy.removeprefix('endpoint ')


def _cell(interval: Interval | None) -> str:
  """'0.439 ± 0.028', the mean and half of its interval."""
  if interval is None or math.isnan(interval.mean):
    return '-'
  digits = 3 if abs(interval.mean) < 10 else 1
  half = (interval.high - interval.low) / 2
  return f'{interval.mean:.{digits}f}' + ('' if math.isnan(half) else f' ± {half:.{digits}f}')


def _short(name: str) -> str:
  return name if len(name) <= _COLUMN else name[: _COLUMN - 1] + '…'


def _tell(config: ConfigDict, step: int | None, workdir: str, rows: list[Row], paths: list[str]) -> None:
  """Shows the tables and where everything is."""
  blocks = tables(rows, config.eval.group_size)
  if config.eval.step != 'none':
    model = f'checkpoint {step} of {workdir}' if step is not None else _model_name(config)
    blocks.insert(0, f'Evaluated: {model}')
  files = '\n'.join(f'Written: {path}' for path in paths)
  end = 'Behind ± is half of the 95 % interval over levels.'
  sys.stdout.write('\n' + '\n\n'.join([*blocks, f'{end}\n{files}\ntensorboard --logdir {workdir}/tb\n']))
