"""The user's own drawings: folders, files of rows, what is left out, and parts."""

from __future__ import annotations

import json
import logging

import pytest

from ragen_jax.envs.svg import drawings
from tests.envs.svg.test_program import svg
from tests.support.environments import raises_one_line


def rect(x: int) -> str:
  return svg(f'<rect x="{x}" y="5" width="9" height="9"/>')


def load(path, *, field='svg', bad='drop', split='all', share=0.3, side=64):
  return drawings.load_drawings(str(path), field, bad, split, share, side, drawings.stamp_of(str(path)))


def test_a_folder_is_read_in_order_each_picture_once(tmp_path):
  (tmp_path / 'b').mkdir()
  (tmp_path / 'b' / '1.svg').write_text(f'<?xml version="1.0"?>\n<!-- a -->\n{rect(20)}\n')
  (tmp_path / 'a.svg').write_text(rect(10))
  (tmp_path / 'c.svg').write_text(rect(10).replace('<rect', '<g><rect').replace('/>', '/></g>'))
  (tmp_path / 'c.txt').write_text('none')
  assert [x.program for x in load(tmp_path)] == [rect(10), rect(20)]
  assert [x.program for x in load(tmp_path / 'b' / '1.svg')] == [rect(20)] == [x.program for x in load(tmp_path / 'b')]
  assert len(load(f'{tmp_path}/*.svg')) == 1
  (tmp_path / 'a.svg').write_text(rect(30))
  assert load(tmp_path)[0].program == rect(30)


def test_rows_of_a_file_and_what_is_left_out(tmp_path, caplog):
  path = tmp_path / 'mine.jsonl'
  rows = [rect(10), 'no', svg('<text>a</text>'), svg(''), rect(40)]
  path.write_text(''.join(json.dumps({'Svg': text}) + '\n' for text in rows))
  with caplog.at_level(logging.WARNING):
    assert [x.program for x in load(path, field='Svg')] == [rect(10), rect(40)]
  assert "3 of 5 drawings are left out; the last: svg: path='" in caplog.text and 'draws nothing' in caplog.text
  with raises_one_line(r"svg: path='.*mine\.jsonl': line 2: has no <svg>"):
    load(path, field='Svg', bad='refuse')
  with raises_one_line(r"line 1: field='svg' is None; allowed: text; the row has the fields Svg"):
    load(path)
  path.write_text('[1]\n')
  with raises_one_line(r"svg: path='.*mine\.jsonl': line 1 is \[1\]; allowed: an object"):
    load(path)


@pytest.mark.parametrize(('side', 'seen'), [(16, False), (48, False), (64, True)])
def test_a_drawing_that_is_white_at_the_size_of_the_pictures_is_left_out(tmp_path, side, seen):
  thin = svg('<rect y="0.15" width="100" height="0.1"/>')  # between two lines of samples, but for 64 pixels
  path = tmp_path / 'mine.json'
  path.write_text(json.dumps([{'svg': rect(10)}, {'svg': thin}]))
  assert [x.program for x in load(path, side=side)] == [rect(10), thin][: 1 + seen]
  if not seen:
    with raises_one_line(rf'mine\.json.*: draws nothing on white at {side} x {side} pixels'):
      load(path, side=side, bad='refuse')


def test_parts_have_no_picture_in_common(tmp_path):
  path = tmp_path / 'mine.json'
  path.write_text(json.dumps([{'svg': rect(x % 30)} for x in range(60)]))
  parts = {split: [x.id for x in load(path, split=split)] for split in ('all', 'train', 'test')}
  assert len(parts['all']) == 30 and sorted(parts['train'] + parts['test']) == sorted(parts['all'])
  assert 3 < len(parts['test']) < 20


@pytest.mark.parametrize(
  ('name', 'content', 'message'),
  [
    ('none', None, r"svg: path='.*none': 0 \.svg files; allowed: from 1 to 50,000 \.svg files of a folder"),
    ('a.txt', 'x', r"svg: path='.*a\.txt': '.*a\.txt'; allowed: from 1"),
    ('a.jsonl', None, r"svg: path='.*a\.jsonl': cannot be read \(No such file"),
    ('a.svg', 'x', r"none of 1 drawings is in the part split='all' .*the last that was left out: .*has no <svg>"),
    ('a.svg', '<svg>' + ' ' * 70_000 + '</svg>', 'has no <svg>|characters; allowed: at most 16,384'),
  ],
)  # fmt: skip
def test_a_wrong_source_is_named_in_one_line(tmp_path, name, content, message):
  if content is not None:
    (tmp_path / name).write_text(content)
  with raises_one_line(message):
    load(tmp_path / name)
