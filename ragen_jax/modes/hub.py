"""Uploads of `--mode=export` to the Hugging Face Hub: a model with its card, and a run's episodes as a data set."""

from __future__ import annotations

import gzip
import json
import logging
import os
import pathlib
import tempfile
import zlib
from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

from ragen_jax.models.presets import PRESETS
from ragen_jax.plots.curves import PANELS, draw_panels
from ragen_jax.plots.matrix import read_evaluations
from ragen_jax.plots.runs import group, read_runs
from ragen_jax.plots.style import figure_style, save_figure
from ragen_jax.runs.config_fields import flatten, read_by_training
from ragen_jax.runs.metrics import read_metrics
from ragen_jax.runs.trackers import without_secrets
from ragen_jax.utils.errors import UserError, describe_error
from ragen_jax.utils.files import replace_file
from ragen_jax.viewer.store import EpisodeFile, read_episodes

_log = logging.getLogger(__name__)

_MAX_CURVE = 30  # lines of the card's table of evaluations
_PICTURES = ('picture', 'final_picture', 'images')


def push_model(config: ConfigDict, workdir: str | os.PathLike[str], output: str, step: int) -> str:
  """Writes the model card into the exported directory `output`, and uploads the directory to `config.export.push`.

  Returns the address of the commit. Raises UserError if the hub refuses the upload or cannot be reached.
  """
  curves = group(read_runs([workdir], [panel.metric for panel in PANELS]))
  panels = [panel for panel in PANELS if any(panel.metric in run.series for curve in curves for run in curve.runs)]
  if panels:
    with figure_style():
      save_figure(draw_panels(panels, curves, width=7.2), pathlib.Path(output) / 'curves')
  card = model_card(config, workdir, step, figure=bool(panels))
  replace_file(pathlib.Path(output) / 'README.md', card)
  message = f'Iteration {step} of {pathlib.Path(workdir).name}'
  return _upload(config, 'export.push', output, 'model', message)


def push_episodes(config: ConfigDict, workdir: str | os.PathLike[str]) -> str:
  """Uploads the episodes of a run as a data set to `config.export.push_episodes`; returns the address of the commit.

  A row is an episode, a `viewer.schema.EpisodeRecord` without pictures. The splits are 'train', episodes of training
  iterations, and 'eval', those of the evaluations. Raises UserError if the run has no episodes, the hub refuses the
  upload or cannot be reached.
  """
  with tempfile.TemporaryDirectory(prefix='ragen-episodes-') as directory:
    counts = dict.fromkeys(('train', 'eval'), 0)
    for split in counts:
      path = pathlib.Path(directory) / f'{split}.jsonl.gz'
      with gzip.open(path, 'wt', encoding='utf-8') as file:
        for part in read_episodes(workdir):
          for record in _records(part) if part.path.name.startswith(split) else ():
            file.write(json.dumps(_without_pictures(record), ensure_ascii=False) + '\n')
            counts[split] += 1
      if not counts[split]:
        path.unlink()
    if not any(counts.values()):
      raise UserError(f'export.push_episodes={config.export.push_episodes!r}: the run has no episodes')
    card = _data_card(config, workdir, {split: count for split, count in counts.items() if count})
    (pathlib.Path(directory) / 'README.md').write_text(card, encoding='utf-8')
    message = f'Episodes of {pathlib.Path(workdir).name}'
    return _upload(config, 'export.push_episodes', directory, 'dataset', message)


def _records(part: EpisodeFile) -> list[dict[str, Any]]:
  """The records of a file; none, with a warning, if it is damaged behind its beginning."""
  try:
    return part.records()
  except (OSError, EOFError, zlib.error, ValueError) as e:
    _log.warning('%s is left out: %s', part.path, ' '.join(str(e).split()) or type(e).__name__)
    return []


def model_card(config: ConfigDict, workdir: str | os.PathLike[str], step: int, *, figure: bool) -> str:
  """The card of an exported model: what it was trained on, evaluations, curve (curves.png if `figure`), config."""
  name, tags = pathlib.Path(workdir).name, ', '.join(config.train.tags)
  base = PRESETS.get(config.model.preset) if not config.model.path else None
  adapter = config.export.lora == 'adapter' and config.lora.rank > 0
  head = [f'library_name: {"peft" if adapter else "transformers"}', 'pipeline_tag: text-generation']
  head += [f'base_model: {base}'] * (base is not None)
  head += ['tags:', *(f'- {tag}' for tag in ('reinforcement-learning', 'agents', 'ragen-jax'))]
  started = f' from [{base}](https://huggingface.co/{base})' if base else ''
  a = config.algorithm
  blocks = [
    '\n'.join(['---', *head, '---']),
    f'# {name}',
    f'A policy trained by reinforcement learning{started} on {tags} with ragen-jax: checkpoint after iteration {step} '
    f'of {config.num_iterations}, estimator `{a.adv_estimator}`, loss `{a.policy_loss}`, {config.train.groups} groups '
    f'of {config.train.group_size} episodes an iteration.',
  ]
  rows = read_metrics(workdir) if (pathlib.Path(workdir) / 'metrics.jsonl').exists() else []
  evaluated = [row for row in rows if 'val-env/success' in row]
  blocks += ['## Evaluation', _results(config, evaluated, workdir, step)]
  if evaluated:
    every = -(-len(evaluated) // _MAX_CURVE)
    columns = [f'val-env/{tag}/success' for tag in config.eval.tags]
    shown = [row for i, row in enumerate(evaluated) if i % every == 0 or row is evaluated[-1]]
    lines = [[int(row['step']), *(row.get(column, float('nan')) for column in columns)] for row in shown]
    blocks += ['## Curve', *['![Curves of the run](curves.png)'] * figure]
    blocks.append(_markdown(['iteration', *(f'{tag}: success' for tag in config.eval.tags)], lines))
  return '\n\n'.join([*blocks, *_config_blocks(config)]) + '\n'


def _results(config: ConfigDict, evaluated: list[dict[str, float]], workdir: str | os.PathLike[str], step: int) -> str:
  """The last evaluation up to a checkpoint during training, and the evaluations of it by --mode=eval."""
  lines = []
  own = next((row for row in reversed(evaluated) if row['step'] <= step), {})
  for tag in config.eval.tags:
    for label, prefix in ((f'temperature {config.eval.temperature:g}', 'val-env'), ('greedy', 'val-greedy')):
      success, best = own.get(f'{prefix}/{tag}/success'), own.get(f'val-env/{tag}/optimal')
      if success is not None:
        lines.append([f'in training, iteration {int(own["step"])}', tag, label, success, best])
  for evaluation in read_evaluations(pathlib.Path(workdir)).values():
    for row in evaluation['rows'] if evaluation.get('checkpoint') == step else ():
      mean, low, high = (row['metrics']['success'][x] for x in ('mean', 'low', 'high'))
      known = mean if None in (low, high) else f'{mean:.3f} ({low:.3f} to {high:.3f})'
      lines.append([f'`--mode=eval`, {row["policy"]}', row['tag'], row['sampling'], known, None])
  if not lines:
    return 'The run has no evaluation of this checkpoint.'
  return _markdown(['evaluation', 'environment', 'sampling', 'success (95 % interval)', 'best possible'], lines)


def _data_card(config: ConfigDict, workdir: str | os.PathLike[str], counts: Mapping[str, int]) -> str:
  files = [line for split in counts for line in (f'  - split: {split}', f'    path: {split}.jsonl.gz')]
  head = ['configs:', '- config_name: default', '  data_files:', *files]
  head += ['tags:', '- reinforcement-learning', '- agents']
  blocks = [
    '\n'.join(['---', *head, '---']),
    f'# Episodes of {pathlib.Path(workdir).name}',
    f'Episodes of a policy on {", ".join(config.train.tags)}, recorded by ragen-jax. A row is an episode with its '
    'turns: prompt, pieces of the reply (tokens) with log-probs, actions, rewards and the observation after them.',
    _markdown(['split', 'episodes'], [[split, count] for split, count in counts.items()]),
  ]
  return '\n\n'.join([*blocks, *_config_blocks(config)]) + '\n'


def _config_blocks(config: ConfigDict) -> list[str]:
  """The fields that training reads, without secrets, in a part of the page that can be opened."""
  fields = flatten(read_by_training(config.to_dict()))
  lines = [f'{name}: {without_secrets(json.dumps(value))}' for name, value in sorted(fields.items())]
  return ['## Config', '<details><summary>All fields</summary>', '\n'.join(['```', *lines, '```']), '</details>']


def _markdown(header: list[str], rows: list[list[Any]]) -> str:
  cells = [['' if x is None else f'{x:.3f}' if isinstance(x, float) else str(x) for x in row] for row in rows]
  rule = ['---' for _ in header]
  return '\n'.join(f'| {" | ".join(x.replace("|", "&#124;") for x in row)} |' for row in [header, rule, *cells])


def _without_pictures(x: Any) -> Any:
  if isinstance(x, dict):
    return {key: _without_pictures(value) for key, value in x.items() if key not in _PICTURES}
  return [_without_pictures(value) for value in x] if isinstance(x, list) else x


def _upload(config: ConfigDict, field: str, directory: str, kind: str, message: str) -> str:
  """Creates the repository if there is none, and uploads a directory in one commit; returns the commit's address."""
  import huggingface_hub

  repository = config.export[field.partition('.')[2]]
  api = huggingface_hub.HfApi(library_name='ragen-jax')
  try:
    api.create_repo(repository, repo_type=kind, private=config.export.private, exist_ok=True)
    return api.upload_folder(
      repo_id=repository, folder_path=directory, repo_type=kind, commit_message=message
    ).commit_url
  except Exception as e:  # the client's transport raises types of its own
    raise UserError(
      f'{field}={repository!r}: was not uploaded ({without_secrets(describe_error(e))[:300]}); HF_TOKEN or '
      '`hf auth login` gives access, and the same command tries again'
    ) from e
