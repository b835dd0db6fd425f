"""The size of an engine."""

from __future__ import annotations

import pytest

from ragen_jax.utils.errors import UserError
from tests.support.serving import settings


@pytest.mark.parametrize(
  ('change', 'message'),
  [
    ({'slots': 0}, 'slots=0: must be at least 1'),
    ({'chunk': 0}, 'chunk=0: must be at least 1'),
    ({'max_queue': -1}, 'max_queue=-1: must be at least 0'),
    ({'max_context': 1}, 'max_context=1: must be at least 2, a prompt and a reply of one token'),
    ({'widths': ()}, 'widths=(): must be ascending numbers from 1'),
    ({'widths': (16, 4)}, 'widths=(16, 4): must be ascending numbers from 1'),
    ({'widths': (0, 4)}, 'widths=(0, 4): must be ascending numbers from 1'),
    ({'widths': (4, 97)}, 'widths=(4, 97): must be at most max_context, 96'),
  ],
)
def test_sizes_that_make_no_engine_are_refused(change, message):
  with pytest.raises(UserError) as e:
    settings(**change)
  assert str(e.value) == message


def test_columns_of_a_row_hold_what_programs_write_behind_its_tokens():
  assert settings(max_context=96, chunk=4, widths=(8, 16)).columns == 104
  assert settings(max_context=96, chunk=12, widths=(8, 16)).columns == 108
