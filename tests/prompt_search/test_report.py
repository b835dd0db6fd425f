"""The files of a search say what it has found."""

from __future__ import annotations

import json
import math

import pytest

from ragen_jax.prompt_search import report
from ragen_jax.prompt_search.search import REASONS, Final, Prompt, Round, Score
from ragen_jax.runs.metrics import MetricWriter, read_metrics
from tests.support.paths import ROOT


def _score(*tasks, failed=0):
  return Score(tuple(tasks), len(tasks), sum(x >= 1 for x in tasks), failed, '')


FIRST = Prompt(0, 0, None, 'go\n# Prompts', '', _score(0.0, 0.5))
SECOND = Prompt(1, 1, 0, 'run | {x}', 'Too slow.', _score(1.0, 0.5, failed=1))
THIRD = Prompt(2, 1, 0, 'sit', 'Too fast.', _score(0.0, 0.0))
REJECTED = dict.fromkeys(REASONS, 0) | {'empty': 2}
NOW = Round(1, (FIRST, SECOND, THIRD), (1, 0), REJECTED)
FINAL = Final(best=_score(1.0, 1.0, 0.5), first=_score(0.5, 0.0, 0.0))


def test_the_files(tmp_path):
  report.write_results(tmp_path, NOW, REJECTED, FINAL)
  assert (tmp_path / 'best_prompt.txt').read_text() == 'run | {x}\n'
  found = json.loads((tmp_path / 'prompts.json').read_text())
  assert found['best'] == 1 and found['round'] == 1 and found['rejected'] == REJECTED
  assert [(p['number'], p['parent'], p['in_beam'], p['score'], p['failed']) for p in found['prompts']] == [
    (0, None, True, 0.25, 0), (1, 0, True, 0.75, 1), (2, 0, False, 0.0, 0)
  ]  # fmt: skip
  assert found['prompts'][1]['standard_error'] == pytest.approx(0.25)
  assert found['prompts'][1]['text'] == SECOND.text and found['prompts'][1]['critique'] == 'Too slow.'
  assert found['final']['difference'] == pytest.approx(2 / 3)
  assert found['final']['difference_error'] == pytest.approx(1 / 6)
  assert found['final']['first']['score'] == pytest.approx(1 / 6)


def test_one_task_has_no_standard_error(tmp_path):
  one = Prompt(0, 0, None, 'go', '', _score(1.0))
  now = Round(0, (one,), (0,), dict.fromkeys(REASONS, 0))
  report.write_results(tmp_path, now, now.rejected, Final(one.score, one.score))
  found = json.loads((tmp_path / 'prompts.json').read_text())
  assert found['prompts'][0]['standard_error'] is None and found['final']['difference_error'] is None
  assert report.describe(one.score) == '1.000'


def test_the_page_is_sorted_by_score_and_texts_cannot_change_it():
  lines = report.markdown(NOW, REJECTED, FINAL).splitlines()
  rows = [line for line in lines if line.startswith('|')][2:]
  assert rows[0] == '| 1 | 1 | 0 | 0.750 ± 0.250 | 0.500 | 1 | yes |' and rows[1].startswith('| 0 | 0 |  | 0.250')
  assert rows[2].endswith('|  |') and len(rows) == 3
  assert [line for line in lines if line.startswith('#')] == [
    '# Prompts', '## Comparison on tasks that no score has used', '## Prompt 0', '## Prompt 1', '## Prompt 2'
  ]  # fmt: skip
  assert '    # Prompts' in lines and 'Batches of training tasks without a new prompt: empty 2.' in lines


def test_the_comparison_in_one_line():
  assert report.describe_final(NOW, FINAL) == (
    'On 3 further tasks prompt 1 scores 0.833 ± 0.167 and the first prompt 0.167 ± 0.167, '
    'a difference of +0.667 ± 0.167.'
  )
  kept = Round(1, (FIRST,), (0,), REJECTED)
  assert report.describe_final(kept, Final(FINAL.first, FINAL.first)) == (
    'The first prompt remains the best: 0.167 ± 0.167 on 3 further tasks.'
  )


def test_metrics_of_rounds_and_of_the_end(tmp_path):
  start = Round(0, (FIRST,), (0,), dict.fromkeys(REASONS, 0))
  with MetricWriter(tmp_path) as writer:
    report.write_metrics(writer, start)
    report.write_metrics(writer, NOW)
    report.write_final_metrics(writer, NOW, FINAL)
  before, after = read_metrics(tmp_path)
  assert (before['step'], before['prompt/best_score'], before['prompt/new']) == (0, 0.25, 1)
  assert (after['prompt/best_score'], after['prompt/best_success'], after['prompt/new']) == (0.75, 0.5, 2)
  assert (after['prompt/new_score'], after['prompt/failed_attempts']) == (0.375, 1)
  assert after['prompt/best_score_error'] == pytest.approx(0.25) and after['prompt/rejected/empty'] == 2
  assert after['prompt/final/difference'] == pytest.approx(2 / 3) and 'prompt/final/first_score' in after
  page = (ROOT / 'docs' / 'metrics.md').read_text(encoding='utf-8')
  missing = [name for name in after if name != 'step' and f'`{name}`' not in page]
  assert not [name for name in missing if not name.startswith('prompt/rejected/')]
  assert all(reason in page for reason in REASONS)


def test_a_round_without_new_prompts(tmp_path):
  with MetricWriter(tmp_path) as writer:
    report.write_metrics(writer, Round(1, (FIRST,), (0,), REJECTED))
  (row,) = read_metrics(tmp_path)
  assert row['prompt/new'] == 0 and 'prompt/new_score' not in row and not math.isnan(row['prompt/best_score'])
