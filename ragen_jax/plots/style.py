"""The style of figures, and their files."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Iterator
from typing import Any

from ragen_jax.utils.errors import DiskError

STYLE = {
  'font.size': 8,
  'axes.titlesize': 8,
  'axes.titlelocation': 'left',
  'axes.spines.top': False,
  'axes.spines.right': False,
  'axes.grid': True,
  'grid.alpha': 0.3,
  'grid.linewidth': 0.5,
  'axes.axisbelow': True,
  'legend.frameon': False,
  'legend.fontsize': 7,
  'legend.labelspacing': 0.35,
  'savefig.dpi': 200,
  'svg.fonttype': 'none',  # text stays text, so it can be searched and edited
  'svg.hashsalt': 'ragen-jax',  # equal figures give equal files
}


@contextlib.contextmanager
def figure_style() -> Iterator[None]:
  """Context manager: draws figures with these settings of matplotlib instead of the user's."""
  import matplotlib

  with matplotlib.rc_context():
    matplotlib.rcdefaults()
    matplotlib.rcParams.update(STYLE)
    yield


def save_figure(figure: Any, path: pathlib.Path) -> list[str]:
  """Writes a figure as PATH.png and PATH.svg; returns both paths. DiskError if the disk is full or not writable."""
  paths = [f'{path}.png', f'{path}.svg']
  try:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(paths[0], bbox_inches='tight')
    figure.set_layout_engine('none')  # the layout is already computed, and computing it takes longer than drawing
    figure.savefig(paths[1], bbox_inches='tight', metadata={'Date': None})
  except OSError as e:
    raise DiskError(f'{path}.png and .svg were not written: {e.strerror or e}; --output names another place') from e
  return paths
