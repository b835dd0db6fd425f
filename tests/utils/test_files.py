"""Files are replaced as a whole, and PNG pictures are what any reader makes of them."""

from __future__ import annotations

import io

import matplotlib.image
import numpy as np
import pytest

from ragen_jax.utils.errors import UserError
from ragen_jax.utils.files import encode_png, replace_file


@pytest.mark.parametrize('many_writers', [False, True])
def test_a_file_is_replaced_and_its_directory_is_made(tmp_path, many_writers):
  path = tmp_path / 'new' / 'a.txt'
  for content in (b'\xff\x00', 'Gruß\n'):
    replace_file(path, content, many_writers=many_writers)
    assert path.read_bytes() == (content.encode() if isinstance(content, str) else content)
  assert [p.name for p in path.parent.iterdir()] == ['a.txt']


def test_the_old_file_stays_where_the_new_one_cannot_be_written(tmp_path):
  path = tmp_path / 'a.txt'
  replace_file(path, 'old')
  (tmp_path / 'a.txt.tmp').mkdir()
  with pytest.raises(UserError) as e:
    replace_file(path, 'new')
  assert str(e.value) == f'{path} was not written: Is a directory' and path.read_text() == 'old'
  with pytest.raises(UserError, match=r'^metrics were not written: File exists$'):
    replace_file(path / 'b.txt', 'new', 'metrics were not written')


@pytest.mark.parametrize('many_writers', [False, True])
def test_nothing_is_left_of_a_file_that_could_not_be_replaced(tmp_path, many_writers):
  (tmp_path / 'a').mkdir()
  with pytest.raises(UserError, match='was not written'):
    replace_file(tmp_path / 'a', 'new', many_writers=many_writers)
  assert [p.name for p in tmp_path.iterdir()] == ['a']


def test_a_png_is_the_picture():
  picture = np.random.default_rng(0).integers(256, size=(5, 7, 3)).astype(np.uint8)
  read = matplotlib.image.imread(io.BytesIO(encode_png(picture)))
  np.testing.assert_array_equal((read * 255).round().astype(np.uint8), picture)
