"""Traces of some iterations for xprof and TensorBoard, in <workdir>/tb/plugins/profile/."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence

import jax

from ragen_jax.utils.errors import describe_error

_log = logging.getLogger(__name__)


class Profile:
  """Traces the iterations from the first to the last of `span`; the caller says which iteration begins."""

  def __init__(self, span: Sequence[int], workdir: str | os.PathLike[str]):
    """Traces nothing yet; `span` is the first and the last iteration to trace, from 1, or empty."""
    self._first, self._last = span or (0, -1)
    self._directory = os.path.join(workdir, 'tb')
    self._step: jax.profiler.StepTraceAnnotation | None = None  # of the iteration that is traced

  def begin(self, iteration: int) -> None:
    """Ends the iteration before, if it was traced, and traces `iteration` if it is one of the span.

    A profiler that fails is reported in one line; the run goes on without it.
    """
    wanted, tracing = self._first <= iteration <= self._last, self._step is not None
    try:
      if tracing:
        self._step.__exit__(None, None, None)
        self._step = None
      if tracing and not wanted:
        jax.profiler.stop_trace()
        _log.info('iterations %d to %d are traced in %s', self._first, self._last, self._directory)
      if wanted:
        if not tracing:
          options = jax.profiler.ProfileOptions()
          options.python_tracer_level = 0  # calls of Python functions would fill the trace
          jax.profiler.start_trace(self._directory, profiler_options=options)
        self._step = jax.profiler.StepTraceAnnotation('iteration', step_num=iteration)
        self._step.__enter__()
    except (OSError, RuntimeError, ValueError) as e:
      self._last = -1
      _log.warning('profile: the iterations are not traced: %s', describe_error(e))

  def close(self) -> None:
    """Ends the trace, if there is one; also in a run that ends early."""
    self.begin(self._last + 1)
