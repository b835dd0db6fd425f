"""What --mode=eval cannot evaluate is refused in one line."""

from __future__ import annotations

import math

import pytest

from ragen_jax.config.evaluation_checks import check_eval
from tests.support.configs import assert_refused, small_config

_ENDPOINT = {'eval.endpoint': 'http://127.0.0.1:9/v1', 'eval.endpoint_model': 'm'}


@pytest.mark.parametrize(
  ('fields', 'message'),
  [
    ({'eval.temperature': math.inf}, r'^eval\.temperature=inf: must be a number$'),
    ({'eval.temperature': math.nan}, r'^eval\.temperature=nan: must be a number$'),
    ({'eval.step': 'newest'}, r"^eval\.step='newest': must be latest, best, the number of an iteration, base or none$"),
    ({'eval.step': '-1'}, r"^eval\.step='-1': must be latest, best"),
    ({'eval.step': ''}, r"^eval\.step='': must be latest, best"),
    ({'eval.baselines': ('expert',)}, r"^eval\.baselines=\('expert',\): allowed: each at most once of random, solver$"),
    ({'eval.baselines': ('random', 'random')}, r'^eval\.baselines=.*: allowed: each at most once'),
    (
      {'eval.step': 'none', 'eval.baselines': ()},
      r"^eval\.step='none': nothing would be evaluated; set eval\.baselines or eval\.endpoint$",
    ),
    ({'eval.endpoint_workers': 0}, r'^eval\.endpoint_workers=0: must be at least 1$'),
    ({'eval.endpoint_tries': 0}, r'^eval\.endpoint_tries=0: must be at least 1$'),
    ({'eval.endpoint_max_tokens': -1}, r'^eval\.endpoint_max_tokens=-1: must be at least 0$'),
    ({'eval.endpoint_timeout': 0.0}, r'^eval\.endpoint_timeout=0\.0: must be above 0, in seconds$'),
    ({'eval.endpoint_timeout': math.inf}, r'^eval\.endpoint_timeout=inf: must be above 0, in seconds$'),
    (
      _ENDPOINT | {'eval.endpoint_model': ''},
      r"^eval\.endpoint_model='': must name a model of eval\.endpoint='http://",
    ),
    (
      {'eval.endpoint_model': 'm'},
      r"^eval\.endpoint_model='m': must name a model of eval\.endpoint='', and must be empty without an endpoint$",
    ),
  ],
)
def test_what_cannot_be_evaluated_is_told_in_one_line(fields, message):
  assert_refused(check_eval, small_config(fields), message)


@pytest.mark.parametrize(
  'fields',
  [
    *({'eval.step': step} for step in ('latest', 'best', '0', '40', 'base')),
    {'eval.step': 'none', 'eval.baselines': ('solver', 'random')},
    _ENDPOINT | {'eval.step': 'none', 'eval.baselines': ()},
    _ENDPOINT | {'eval.temperature': 0.0, 'eval.endpoint_max_tokens': 0, 'eval.endpoint_timeout': 0.5},
  ],
)
def test_what_can_be_evaluated(fields):
  check_eval(small_config(fields))


def test_the_address_of_an_endpoint_is_plain():
  for url in ('http://localhost:8000/v1', 'https://models.example.org/v1', 'http://[::1]:80'):
    check_eval(small_config(_ENDPOINT | {'eval.endpoint': url}))
  for url in (
    'localhost:8000', 'ftp://localhost/v1', 'http:///v1', 'http://localhost:0/v1', 'http://localhost:many/v1',
    'http://me:secret@localhost/v1', 'http://localhost/v1?key=secret', 'http://localhost/v1#top',
    'http://local host/v1', 'http://löcalhost/v1', 'http://localhost/v1\n', 'http://[::1/v1',
  ):  # fmt: skip
    message = r"^eval\.endpoint='.*': must be an address such as 'http://localhost:8000/v1', or empty$"
    assert_refused(check_eval, small_config(_ENDPOINT | {'eval.endpoint': url}), message)
