"""The axes of the device mesh."""

from __future__ import annotations

import pytest

from ragen_jax.distributed.mesh import make_mesh
from ragen_jax.utils.errors import UserError


def test_axes_must_multiply_to_the_devices():
  with pytest.raises(UserError, match=r'mesh\.fsdp=2.*number of devices, 1'):
    make_mesh(1, 2, 1)
  with pytest.raises(UserError, match=r'data=-1, mesh\.fsdp=3, .* tensor must divide the number of devices, 1$'):
    make_mesh(-1, 3, 1)
  assert dict(make_mesh(-1, 1, 1).shape) == {'data': 1, 'fsdp': 1, 'tensor': 1}


@pytest.mark.parametrize('axes', [(0, 1, 1), (-2, 1, 1), (1, 0, 1), (1, 1, -1)])
def test_sizes_below_one_are_refused_by_name(axes):
  with pytest.raises(UserError, match=r'mesh\.data=.*each must be at least 1') as e:
    make_mesh(*axes)
  assert '\n' not in str(e.value)
