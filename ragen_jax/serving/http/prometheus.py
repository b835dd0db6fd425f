"""HTTP: metrics of the endpoint in the text format of Prometheus (version 0.0.4)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ragen_jax.serving.engine.settings import EngineStats

# Fields of `EngineStats` -> (name, type, help).
_ENGINE = {
  'alive': ('up', 'gauge', 'whether calls are served'),
  'slots': ('slots', 'gauge', 'rows of the device'),
  'used': ('slots_used', 'gauge', 'rows with a reply'),
  'queued': ('queued_calls', 'gauge', 'calls that wait for a row'),
  'paused': ('paused', 'gauge', 'whether calls are held'),
  'version': ('policy_version', 'gauge', 'version of the weights'),
  'prompt_tokens': ('prompt_tokens_total', 'counter', 'tokens of prompts'),
  'cached_tokens': ('cached_tokens_total', 'counter', 'tokens of prompts that were not fed again'),
  'fed_tokens': ('fed_tokens_total', 'counter', 'tokens that were fed'),
  'fed_columns': ('fed_columns_total', 'counter', 'columns that were computed for them'),
  'sampled_tokens': ('sampled_tokens_total', 'counter', 'tokens of replies'),
  'row_steps': ('row_steps_total', 'counter', 'rows times steps of decoding'),
  'copies': ('row_copies_total', 'counter', 'rows that were copied or cut'),
  'chunks': ('chunks_total', 'counter', 'chunks of decoding'),
  'finished': ('replies_finished_total', 'counter', 'replies that ended by themselves'),
  'aborted': ('replies_aborted_total', 'counter', 'replies that were cancelled'),
  'busy_seconds': ('busy_seconds_total', 'counter', 'seconds in which the device was fed and sampled'),
}


def render(
  stats: Mapping[str, EngineStats],
  counts: Mapping[str, int],
  statuses: Mapping[tuple[str, int], int],
  rollouts: Mapping[str, int],
  sessions: int,
) -> str:
  """All metrics.

  Args:
    stats: of each engine, see `Engines.stats`; those of frozen weights have the label `frozen`.
    counts: of the service, by name; 'row' and 'new_row:<cause>' count calls by the rows that they extend or begin.
    statuses: number of responses by route and HTTP status.
  """
  lines: list[str] = []
  by_label = {f'{{frozen="{_escape(weights)}"}}' if weights else '': s for weights, s in stats.items()}
  for field, (name, kind, about) in _ENGINE.items():
    lines += _metric(name, kind, about, {label: float(getattr(s, field)) for label, s in by_label.items()})
  lines += _metric('sessions', 'gauge', 'attempts with a session in memory', {'': sessions})
  by_route = {f'{{route="{_escape(route)}",status="{status}"}}': n for (route, status), n in sorted(statuses.items())}
  lines += _metric('requests_total', 'counter', 'responses by route and status', by_route)
  states = {f'{{state="{_escape(str(state))}"}}': n for state, n in sorted(rollouts.items())}
  lines += _metric('rollouts', 'gauge', 'rollouts by state', states)
  causes = {f'{{cause="{n.partition(":")[2]}"}}': x for n, x in sorted(counts.items()) if n.startswith('new_row:')}
  lines += _metric('new_rows_total', 'counter', 'calls that began another row, by cause', causes)
  for name, about in (
    ('row', 'calls that extended a row or began the first'), ('calls', 'calls that were stored'),
    ('aborted', 'calls that were stored as aborted'), ('repeated', 'requests that a client repeated'),
  ):  # fmt: skip
    lines += _metric(
      f'{name}_total' if name != 'row' else 'merged_calls_total', 'counter', about, {'': counts.get(name, 0)}
    )
  return '\n'.join(lines) + '\n'


def _metric(name: str, kind: str, about: str, values: Mapping[str, float]) -> Iterator[str]:
  yield f'# HELP ragen_{name} {about}'
  yield f'# TYPE ragen_{name} {kind}'
  for labels, value in values.items():
    yield f'ragen_{name}{labels} {value:.17g}'


def _escape(text: str) -> str:
  return text.replace('\\', r'\\').replace('"', r'\"').replace('\n', r'\n')
