"""Figures look the same for every user, and the same figure is the same file."""

from __future__ import annotations

import pathlib

import matplotlib
import matplotlib.pyplot as plt
import pytest

from ragen_jax.plots import curves as curves_lib
from ragen_jax.plots import runs as runs_lib
from ragen_jax.plots.style import STYLE, figure_style, save_figure
from ragen_jax.utils.errors import UserError
from tests.support.made_up_runs import read, shown, texts_of, two_algorithms


def _draw():
  figure, axis = plt.subplots(figsize=(3, 2), layout='constrained')
  axis.plot([1, 2, 4])
  axis.set_title('success of three runs')
  plt.close(figure)
  return figure


def test_the_user_s_own_settings_have_no_effect_and_come_back(tmp_path):
  with figure_style():
    ours = [pathlib.Path(path).read_bytes() for path in save_figure(_draw(), tmp_path / 'ours')]
  with matplotlib.rc_context({'lines.linewidth': 9.0, 'axes.grid': False, 'font.size': 20, 'svg.fonttype': 'path'}):
    with figure_style():
      assert {name: matplotlib.rcParams[name] for name in STYLE} == STYLE
      theirs = [pathlib.Path(path).read_bytes() for path in save_figure(_draw(), tmp_path / 'theirs')]
    assert (matplotlib.rcParams['lines.linewidth'], matplotlib.rcParams['font.size']) == (9.0, 20)
  assert ours == theirs


def test_a_figure_is_a_picture_and_a_drawing_whose_text_can_be_searched(tmp_path):
  with figure_style():
    paths = save_figure(_draw(), tmp_path / 'below' / 'figure.of.1')
  assert paths == [f'{tmp_path}/below/figure.of.1.png', f'{tmp_path}/below/figure.of.1.svg']
  assert 'success of three runs' in texts_of(paths[1])
  assert shown(paths[0]).shape[1] == pytest.approx(3 * 200, abs=40)  # inches at 200 dots each


def test_the_same_figures_are_the_same_files(tmp_path):
  pictures = [curves_lib.PANELS[0]]
  curves = runs_lib.group([read(run) for run in two_algorithms(tmp_path)])
  files = []
  for name in ('a', 'b'):
    with figure_style():
      paths = save_figure(curves_lib.draw_panels(pictures, curves, 3.5), tmp_path / name)
    files.append([pathlib.Path(path).read_bytes() for path in paths])
  assert files[0] == files[1]


def test_a_place_that_cannot_be_written_is_told_in_one_line(tmp_path):
  (tmp_path / 'file').touch()
  with pytest.raises(UserError, match=r'/file/figure\.png and \.svg were not written: .*; --output names another') as e:
    save_figure(_draw(), tmp_path / 'file' / 'figure')
  assert '\n' not in str(e.value)
