"""The text that Prometheus reads."""

from __future__ import annotations

import dataclasses
import re

from ragen_jax.serving.engine.settings import EngineStats
from ragen_jax.serving.http import prometheus
from ragen_jax.serving.types import RolloutState

STATS = EngineStats(
  alive=True, slots=4, used=2, queued=1, paused=False, version=7, prompt_tokens=100, cached_tokens=60, fed_tokens=40,
  fed_columns=64, sampled_tokens=30, row_steps=48, copies=1, chunks=9, finished=3, aborted=1, busy_seconds=0.25,
)  # fmt: skip
_SAMPLE = re.compile(r'ragen_[a-z_]+(\{[a-z]+="(?:[^"\\]|\\.)*"(,[a-z]+="(?:[^"\\]|\\.)*")*\})? [0-9.e+-]+')


def test_every_number_has_a_type_and_a_form_that_prometheus_reads():
  counts = {'calls': 5, 'row': 3, 'new_row:fork': 2, 'aborted': 1, 'repeated': 4}
  statuses = {('/v1/a"b\\\n', 200): 3, ('/v1/x', 404): 1}
  text = prometheus.render({'': STATS}, counts, statuses, {RolloutState.QUEUED: 6}, 2)
  lines = text.splitlines()
  assert text.endswith('\n') and all(line.startswith('# ') or _SAMPLE.fullmatch(line) for line in lines)
  named = {re.split('[ {]', line)[0] for line in lines if not line.startswith('#')}
  typed = {line.split()[2] for line in lines if line.startswith('# TYPE')}
  assert named == typed and len([line for line in lines if line.startswith('# TYPE')]) == len(typed)
  for line in (
    'ragen_up 1', 'ragen_slots_used 2', 'ragen_policy_version 7', 'ragen_busy_seconds_total 0.25', 'ragen_sessions 2',
    r'ragen_requests_total{route="/v1/a\"b\\\n",status="200"} 3', 'ragen_rollouts{state="queued"} 6',
    'ragen_new_rows_total{cause="fork"} 2', 'ragen_merged_calls_total 3', 'ragen_calls_total 5',
    'ragen_aborted_total 1', 'ragen_repeated_total 4',
  ):  # fmt: skip
    assert line in lines


def test_frozen_weights_have_a_label():
  stats = {'': STATS, 'a"@3': dataclasses.replace(STATS, version=3)}
  lines = prometheus.render(stats, {}, {}, {}, 0).splitlines()
  assert 'ragen_policy_version 7' in lines and r'ragen_policy_version{frozen="a\"@3"} 3' in lines
  assert len([line for line in lines if line == '# TYPE ragen_up gauge']) == 1


def test_counters_are_named_as_counters():
  lines = prometheus.render({'': STATS}, {}, {}, {}, 0).splitlines()
  for line in lines:
    if line.startswith('# TYPE'):
      _, _, name, kind = line.split()
      assert name.endswith('_total') == (kind == 'counter'), name
