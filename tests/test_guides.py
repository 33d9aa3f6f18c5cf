"The guides' figures say what the code draws today; every file and notebook that the guides name exists"
import re

import pytest
from conftest import ROOT

from deepspec.longmem.pictures import MEMORY_FIGURES
from deepspec.report.concepts import CONCEPT_FIGURES, THEMES, figure_texts, write_figures

FIGURES = CONCEPT_FIGURES | MEMORY_FIGURES
GUIDES = sorted((ROOT/'docs'/'guides').glob('*.md'))


@pytest.mark.parametrize('name', FIGURES)
def test_committed_figures_are_what_the_code_draws(name, tmp_path):
    for path in write_figures({name: FIGURES[name]}, tmp_path):
        committed = ROOT/'docs'/'images'/path.name
        assert committed.exists(), f'{path.name} is missing: python docs/draw_figures.py'
        assert figure_texts(committed) == figure_texts(path), 'stale: python docs/draw_figures.py'


def test_every_figure_is_shown_and_every_shown_one_is_drawn():
    shown = {n for p in GUIDES for n in re.findall(r'^```\{themed-figure\} (\S+)', p.read_text(encoding='utf-8'), re.M)}
    assert shown == FIGURES.keys()
    drawn = {f'{n}-{t}.svg' for n in FIGURES for t in THEMES}
    assert {p.name for p in (ROOT/'docs'/'images').glob('*.svg')} == drawn
