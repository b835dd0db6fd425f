"""The results of a search: a table of its prompts as JSON and Markdown, the best prompt, and metrics.

<workdir>/prompt_search/prompts.json      every prompt with its score, its parent and the critique that it follows
<workdir>/prompt_search/prompts.md        the same as text for people
<workdir>/prompt_search/best_prompt.txt   the prompt with the best score so far
<workdir>/prompt_search/tb/               metrics of each round, for TensorBoard; also in metrics.jsonl
"""

from __future__ import annotations

import json
import math
import os
import pathlib
import statistics
from typing import Any

from ragen_jax.prompt_search.search import Final, Prompt, Round, Score, standard_error
from ragen_jax.runs.metrics import MetricWriter
from ragen_jax.utils.files import replace_file


def write_results(directory: str | os.PathLike[str], now: Round, rejected: dict[str, int], final: Final | None) -> None:
  """Writes the tables of the last round and of the final comparison (None before it), and the best prompt.

  `rejected` has the number of batches without a new prompt, in all rounds, by reason. Raises UserError if the disk is
  full or not writable.
  """
  directory = pathlib.Path(directory)
  content = {
    'round': now.number,
    'best': now.best.number,
    'prompts': [_to_json(prompt, now) for prompt in now.prompts],
    'rejected': rejected,
    'final': None if final is None else final_to_json(final),
  }
  replace_file(directory / 'prompts.json', json.dumps(content, indent=1, allow_nan=False) + '\n')
  replace_file(directory / 'prompts.md', markdown(now, rejected, final))
  replace_file(directory / 'best_prompt.txt', now.best.text + '\n')


def write_metrics(writer: MetricWriter, now: Round) -> None:
  """Writes the metrics of a round, see docs/metrics.md."""
  best, new = now.best.score, [p.score for p in now.prompts if p.round == now.number]
  values = {
    'prompt/best_score': best.mean,
    'prompt/best_score_error': best.standard_error,
    'prompt/best_success': best.successes / best.attempts,
    'prompt/new': len(new),
    'prompt/failed_attempts': sum(score.failed for score in new),
  }
  values |= {'prompt/new_score': statistics.fmean(score.mean for score in new)} if new else {}
  values |= {f'prompt/rejected/{reason}': count for reason, count in now.rejected.items()}
  writer.scalars(now.number, values)
  writer.flush()


def write_final_metrics(writer: MetricWriter, now: Round, final: Final) -> None:
  """Adds the metrics of the final comparison to those of the last round."""
  values = {
    'prompt/final/best_score': final.best.mean,
    'prompt/final/first_score': final.first.mean,
    'prompt/final/difference': statistics.fmean(final.differences),
    'prompt/final/difference_error': standard_error(final.differences),
  }
  writer.scalars(now.number, values)
  writer.flush()


def final_to_json(final: Final) -> dict[str, Any]:
  """The comparison at the end as JSON."""
  return {
    'best': _score(final.best),
    'first': _score(final.first),
    'difference': statistics.fmean(final.differences),
    'difference_error': _finite(standard_error(final.differences)),
  }


def markdown(now: Round, rejected: dict[str, int], final: Final | None) -> str:
  """The results as a Markdown page."""
  lines = [
    '# Prompts',
    '',
    f'After round {now.number}. Scores are means over held-out tasks ± their standard errors.',
    '',
  ]
  lines += ['| Prompt | Round | Parent | Score | Success | Failed attempts | In the beam |']
  lines += ['|---|---|---|---|---|---|---|']
  for p in sorted(now.prompts, key=lambda p: (-p.score.mean, p.number)):
    parent = '' if p.parent is None else p.parent
    kept = 'yes' if p.number in now.beam else ''
    lines.append(
      f'| {p.number} | {p.round} | {parent} | {describe(p.score)} | {p.score.successes / p.score.attempts:.3f} | '
      f'{p.score.failed} | {kept} |'
    )
  told = ', '.join(f'{reason} {count}' for reason, count in rejected.items() if count)
  lines += ['', f'Batches of training tasks without a new prompt: {told or "none"}.', '']
  if final is not None:
    lines += ['## Comparison on tasks that no score has used', '', describe_final(now, final), '']
  for p in now.prompts:
    lines += [f'## Prompt {p.number}', '', _block(p.text), '']
    if p.critique:
      lines += [f'It answers this critique of prompt {p.parent}:', '', _block(p.critique), '']
  return '\n'.join(lines)


def describe(score: Score) -> str:
  """'0.439 ± 0.028'."""
  return f'{score.mean:.3f}{_margin(score.standard_error)}'


def describe_final(now: Round, final: Final) -> str:
  """The comparison in one line."""
  count, first = len(final.first.tasks), describe(final.first)
  if now.best.number == 0:
    return f'The first prompt remains the best: {first} on {count} further tasks.'
  difference = f'{statistics.fmean(final.differences):+.3f}{_margin(standard_error(final.differences))}'
  return (
    f'On {count} further tasks prompt {now.best.number} scores {describe(final.best)} and the first prompt {first}, '
    f'a difference of {difference}.'
  )


def _margin(error: float) -> str:
  return '' if math.isnan(error) else f' ± {error:.3f}'


def _to_json(prompt: Prompt, now: Round) -> dict[str, Any]:
  return {
    'number': prompt.number, 'round': prompt.round, 'parent': prompt.parent, 'in_beam': prompt.number in now.beam,
    **_score(prompt.score), 'text': prompt.text, 'critique': prompt.critique,
  }  # fmt: skip


def _score(score: Score) -> dict[str, Any]:
  return {
    'score': score.mean, 'standard_error': _finite(score.standard_error), 'tasks': len(score.tasks),
    'attempts': score.attempts, 'successes': score.successes, 'failed': score.failed,
  }  # fmt: skip


def _finite(x: float) -> float | None:
  return x if math.isfinite(x) else None


def _block(text: str) -> str:
  """A text as an indented block of Markdown, which nothing in the text can end."""
  return '\n'.join(f'    {line}' for line in text.splitlines())
