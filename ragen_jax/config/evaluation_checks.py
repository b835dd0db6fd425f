"""Checks of the fields of `eval` that only --mode=eval reads."""

from __future__ import annotations

import math

from ml_collections import ConfigDict

from ragen_jax.config import rules
from ragen_jax.config.image_checks import check_texts

BASELINES = ('random', 'solver')


def check_eval(config: ConfigDict) -> None:
  """Checks the checkpoint, the baselines and the endpoint of an evaluation.

  Raises:
    UserError: a field has a value that is not allowed; the first such field is named.
  """
  e = config.eval
  rules.check(config, 'eval.temperature', e.temperature < math.inf, 'must be a number')
  has_name = e.step in ('latest', 'best', 'base', 'none') or e.step.isdecimal()
  rules.check(config, 'eval.step', has_name, 'must be latest, best, the number of an iteration, base or none')
  known = len(set(e.baselines)) == len(e.baselines) and set(e.baselines) <= set(BASELINES)
  rules.check(config, 'eval.baselines', known, f'allowed: each at most once of {", ".join(BASELINES)}')
  nothing = e.step == 'none' and not e.baselines and not e.endpoint
  rules.check(config, 'eval.step', not nothing, 'nothing would be evaluated; set eval.baselines or eval.endpoint')
  rules.at_least(config, 1, 'eval.endpoint_workers', 'eval.endpoint_tries')
  rules.at_least(config, 0, 'eval.endpoint_max_tokens')
  rules.check(config, 'eval.endpoint_timeout', 0 < e.endpoint_timeout < math.inf, 'must be above 0, in seconds')
  rules.check(
    config, 'eval.endpoint', not e.endpoint or rules.is_address(e.endpoint),
    "must be an address such as 'http://localhost:8000/v1', or empty",
  )  # fmt: skip
  if e.endpoint:
    check_texts(config, tuple(e.tags), f'eval.endpoint={e.endpoint!r}')
  rules.check(
    config, 'eval.endpoint_model', bool(e.endpoint_model) == bool(e.endpoint),
    f'must name a model of eval.endpoint={e.endpoint!r}, and must be empty without an endpoint',
  )  # fmt: skip
