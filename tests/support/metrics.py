"""Metrics of runs, as far as two equal runs agree in them."""

from __future__ import annotations

import os

from ragen_jax.runs.metrics import read_metrics
from ragen_jax.runs.timing import MEASURED


def comparable_metrics(workdir: str | os.PathLike[str], *, without: tuple[str, ...] = ()) -> list[dict[str, float]]:
  """The lines of metrics.jsonl without times and memory, and without names that begin with one of `without`."""
  skipped = (*MEASURED, *without)
  return [{name: x for name, x in line.items() if not name.startswith(skipped)} for line in read_metrics(workdir)]
