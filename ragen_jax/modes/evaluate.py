"""`--mode=eval`: evaluates a checkpoint and optional baselines on the same held-out levels, with 95 % intervals.

All policies play the same levels with the same random numbers and limits. The results are

  <workdir>/evaluation/<name>.json    every number
  <workdir>/evaluation/<name>/        episodes, and the page that shows them
  <workdir>/tb/evaluation/            the numbers at the checkpoint's step, for TensorBoard
"""

from __future__ import annotations

import contextlib
import json
import logging
import pathlib
import sys
import tempfile
from collections.abc import Collection, Mapping
from typing import Any

import jax
from ml_collections import ConfigDict

from ragen_jax import build, build_agents
from ragen_jax.agent.chat import ChatTokenizer
from ragen_jax.agent.endpoint_client import EndpointSettings
from ragen_jax.agent.endpoint_speaker import EndpointSpeaker
from ragen_jax.agent.env_manager import EnvStateManager
from ragen_jax.agent.language_model import LanguageModel
from ragen_jax.config.checks import check_config, check_eval
from ragen_jax.evaluation.baselines import EvaluationLevels, evaluation_levels, play_baseline
from ragen_jax.evaluation.report import (
  VERSION,
  EvaluationRow,
  describe_sampling,
  free_name,
  make_row,
  tables,
  write_json,
  write_row_events,
)
from ragen_jax.models import presets
from ragen_jax.modes.chosen_checkpoint import compare_with_run, find_step, load_weights, model_name
from ragen_jax.runs.checkpoints import Checkpointer
from ragen_jax.runs.compilation_cache import use_compilation_cache
from ragen_jax.runs.staging import StagedWorkdir, address
from ragen_jax.runs.workdir import changed_fields, open_workdir
from ragen_jax.training.run_log import BEST
from ragen_jax.utils.errors import Diverged, UserError, one_line
from ragen_jax.viewer.page import write_page
from ragen_jax.viewer.store import EpisodeWriter

_log = logging.getLogger(__name__)


def evaluate(config: ConfigDict, workdir: str, *, given: bool = False) -> dict[str, Any]:
  """Evaluates the policies that `config.eval` names, and writes the results.

  `workdir` is the directory of the run or, for a model without a run, of the results. Returns the content of the JSON
  file, and its path as 'path'. For `given` see chosen_checkpoint.py.

  Raises:
    UserError: the config cannot be run; there is no such checkpoint, or it belongs to another config; the endpoint
      cannot be reached; a file cannot be written; an environment failed in all episodes (the results are written).
    Diverged: log-probs, entropies or values of the policy are not finite.
  """
  if jax.process_count() > 1:
    raise UserError(f'--mode=eval runs in one process, there are {jax.process_count()}; devices may be many')
  check_eval(config)
  check_config(config, played=('eval',))
  if config.eval.endpoint and build_agents.plays_agents(config):
    raise UserError(
      f'eval.endpoint={config.eval.endpoint!r}: must be empty: programs play {", ".join(config.eval.tags)}, and call '
      'the model that this command serves'
    )
  with open_workdir(workdir, write=False) as place:
    return _evaluate(config, place, given)


def _evaluate(config: ConfigDict, workdir: str | StagedWorkdir, given: bool) -> dict[str, Any]:
  with Checkpointer(workdir, keep=config.checkpoint.keep, save_best=BEST) as checkpointer:
    step = find_step(config, workdir, checkpointer, given)
    warm_start = step is not None and 'data' in checkpointer.meta(step)
    trained_on = [] if step is None else compare_with_run(config, workdir, warm_start=warm_start)
    if trained_on:
      _warn_of_other_levels(config, workdir, trained_on, warm_start)
    head = _head(config, step, trained_on)
    directory = _make(pathlib.Path(workdir) / 'evaluation')
    use_compilation_cache(config.compilation_cache, workdir)
    try:
      rows, records = _play_all(config, checkpointer, step)
    except BaseException:
      with contextlib.suppress(OSError):  # it has the results of other evaluations
        directory.rmdir()
      raise
  name = free_name(directory, head)  # after playing, because another evaluation may have ended in the meantime
  path = directory / f'{name}.json'
  try:
    content = write_json(path, head, rows)
    EpisodeWriter(directory / name).write('eval', step or 0, records)
    page = write_page(directory / name)
    write_row_events(workdir, name, step or 0, rows)
  except UserError:
    _show(config, step, workdir, rows, [])  # what was played is not lost with the disk
    raise
  paths = [address(path, workdir) for path in (path, page) if path]
  _show(config, step, workdir, rows, paths)
  _check_played(rows)
  return content | {'path': paths[0]}


def _check_played(rows: list[EvaluationRow]) -> None:
  """Raises UserError if an environment failed in every episode of a row, whose numbers then mean nothing."""
  for row in rows:
    if 'env_errors' in row.metrics and row.metrics['env_errors'].mean == 1:
      raise UserError(f'envs.{row.tag}: the environment failed in all {row.episodes} episodes of {row.policy}')


def _warn_of_other_levels(
  config: ConfigDict, workdir: str | StagedWorkdir, trained_on: list[str], warm_start: bool
) -> None:
  """Warns if games that were trained on are evaluated on levels that the training did not hold out."""
  run = changed_fields(workdir, config.to_dict())[0]
  counted = ('tags', 'groups', 'tag_groups', 'first_level')
  used = {name: run['eval'].get(name, config.eval[name]) for name in counted}
  same = all(json.dumps(used[name]) == json.dumps(config.eval[name]) for name in counted)
  held_out = not warm_start or run['sft'].get('skip_held_out', True)
  trained = {run['envs'][tag]['type'] for tag in trained_on if tag in run['envs']}
  counts = dict(zip(config.eval.tags, build.group_counts(config.eval, 'eval'), strict=True))
  played = {tag for tag in counts if config.envs[tag].type in trained}
  if not played or (same and held_out) or (warm_start and run['sft'].get('skip_held_out_of')):
    return
  try:
    levels = _levels(config, counts, config.eval.first_level, played)
    others = levels
    if held_out:
      own = config.copy_and_resolve_references()
      with own.unlocked():
        own.eval.update(used)
        for tag in used['tags']:
          own.envs[tag] = ConfigDict(run['envs'][tag])
      counts = dict(zip(used['tags'], build.group_counts(own.eval, 'eval'), strict=True))
      others = levels - _levels(own, counts, used['first_level'], counts)
  except (UserError, KeyError, TypeError, ValueError) as e:
    _log.info('the levels that training held out are not known: %s', one_line(e, str))
    return
  if others:
    _log.warning(
      '%d of %d levels are not those that training held out (its eval.first_level=%d, eval.groups=%d): it may have '
      'played them',
      len(others), len(levels), used['first_level'], used['groups'],
    )  # fmt: skip


def _levels(config: ConfigDict, counts: Mapping[str, int], first_level: int, chosen: Collection[str]) -> set[bytes]:
  """The levels of the chosen tags in an evaluation that plays so many of each; those of a tag follow the last one's."""
  found: set[bytes] = set()
  for tag, count in counts.items():
    if tag in chosen:
      found |= EnvStateManager(build.env_specs(config, (tag,), (count,)), 1).levels_from(first_level)
    first_level += count
  return found


def _head(config: ConfigDict, step: int | None, trained_on: list[str]) -> dict[str, Any]:
  """The JSON of an evaluation without its rows, which identifies the evaluation."""
  head = {
    'version': VERSION,
    'model': '' if config.eval.step == 'none' else model_name(config),
    'checkpoint': step,
    'trained_on': trained_on,
    'seed': config.seed,
    'eval': config.eval.to_dict(),
    'agent': config.agent.to_dict(),
    'envs': {tag: config.envs[tag].to_dict() for tag in config.eval.tags},
  }
  return json.loads(json.dumps(head))


def _play_all(
  config: ConfigDict, checkpointer: Checkpointer, step: int | None
) -> tuple[list[EvaluationRow], list[dict[str, Any]]]:
  """Plays the levels with every policy: rows in the order of the tables, and records of some episodes."""
  e = config.eval
  specs = build.env_specs(config, tuple(e.tags), build.group_counts(e, 'eval'), field='eval.tags')
  levels = evaluation_levels(specs, build.evaluation_settings(config))
  endpoint = EndpointSpeaker(build.fill(EndpointSettings, e), build.sampling(e)) if e.endpoint else None
  # Loaded before anything is played, because a run in progress may delete the checkpoint in the meantime.
  model = load_weights(config, checkpointer, step) if e.step != 'none' else None
  others, records = [], []
  if build_agents.plays_agents(config):
    _log.info('agent programs play %s; there are no baselines', ', '.join(e.tags))
  else:
    others, records = _play_baselines(config, levels, endpoint, step or 0)
  models = []
  if model is not None:
    models, own = _play_model(config, *model, step, levels)
    records = own + records
  rows = models + others
  if not rows:
    raise UserError(
      f'eval.baselines={tuple(e.baselines)}: none can play {", ".join(e.tags)}, and nothing else is evaluated with '
      f'eval.step={e.step!r}; set eval.step or eval.endpoint'
    )
  return [row for tag in e.tags for row in rows if row.tag == tag], records


def _play_model(
  config: ConfigDict, policy: LanguageModel, params: Any, step: int | None, levels: list[EvaluationLevels]
) -> tuple[list[EvaluationRow], list[dict[str, Any]]]:
  config = config.copy_and_resolve_references()
  if config.eval.temperature == 0:
    config.eval.greedy_too = False  # the sampled episodes are greedy already
  name = f'checkpoint {step}' if step is not None else f'model {model_name(config)}'
  _log.info('%s: %s', name, policy.describe())
  # The store is not kept, so that programs play again in the next evaluation.
  with tempfile.TemporaryDirectory() as store, build_agents.open_players(config, policy, store) as players:
    evaluator = build.make_evaluator(config, policy, players['eval'])
    sampled, greedy, records, not_finite = evaluator.episodes(params, step or 0)
  if not_finite:
    raise Diverged(f'{name}: not finite: {not_finite}; its success means nothing, and no result is written')
  splits = [(describe_sampling(build.sampling(config.eval)), sampled), ('greedy', greedy)]
  size = config.eval.group_size
  rows = [
    make_row(name, 'model', part.spec.tag, sampling, episodes, size, part.best)
    for sampling, episodes in splits
    for part in levels
    if episodes
  ]
  return rows, records


def _play_baselines(
  config: ConfigDict, levels: list[EvaluationLevels], endpoint: EndpointSpeaker | None, step: int
) -> tuple[list[EvaluationRow], list[dict[str, Any]]]:
  """Rows and records of the baselines and of the endpoint, which comes last in the tables."""
  e, rows, records = config.eval, [], []
  settings = build.evaluation_settings(config)
  tokenizer = ChatTokenizer(presets.resolve(config.model.preset, config.model.path))
  # The endpoint plays first, so an unreachable address is an error before programs are compiled.
  for kind in [*(['endpoint'] if endpoint else []), *e.baselines]:
    name, sampling = kind, ''
    if kind == 'endpoint':
      name, sampling = f'endpoint {e.endpoint_model}', describe_sampling(settings.sampling)
    for part in levels:
      context = build.context_manager(config, tokenizer, [part.spec])
      episodes, own = play_baseline(
        kind, part, context, settings, endpoint=endpoint, limits=build.episode_limits(config, [part.spec]), step=step
      )
      records += own
      if episodes:
        rows.append(make_row(name, kind, part.spec.tag, sampling, episodes, e.group_size, part.best))
  if endpoint:
    endpoint.warn_of_losses()
  return sorted(rows, key=lambda row: ('random', 'solver', 'endpoint').index(row.kind)), records


def _make(directory: pathlib.Path) -> pathlib.Path:
  """Makes the directory of the results, and a file in it, before anything is played."""
  try:
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=directory):
      pass
  except OSError as e:
    raise UserError(f'--workdir: {directory} cannot be written: {e.strerror or e}') from e
  return directory


def _show(
  config: ConfigDict, step: int | None, workdir: str | StagedWorkdir, rows: list[EvaluationRow], paths: list[str]
) -> None:
  """Writes the tables and the paths of all files to standard output."""
  blocks = tables(rows, config.eval.group_size)
  if config.eval.step != 'none':
    model = f'checkpoint {step} of {workdir}' if step is not None else model_name(config)
    blocks.insert(0, f'Evaluated: {model}')
  files = '\n'.join(f'Written: {path}' for path in paths)
  end = '± is half of the 95 % interval over levels.'
  sys.stdout.write('\n' + '\n\n'.join([*blocks, f'{end}\n{files}\ntensorboard --logdir {workdir}/tb\n']))
