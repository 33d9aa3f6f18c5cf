"Rules that hold for the whole house: arrows point down, notebooks are clean, code lines are short"
import json
import re
import sys

import pytest
from conftest import ROOT

NOTEBOOKS = sorted((ROOT/'nbs').glob('[0-9]*.ipynb'))
REPORTS = sorted((ROOT/'reports').glob('*.ipynb'))


def cells(path, kind='code'):
    "Sources of a notebook's cells"
    return [''.join(c['source']) for c in json.loads(path.read_text())['cells'] if c['cell_type'] == kind]


def upward_imports():
    "Pairs (notebook, module) where a notebook imports a higher-numbered one"
    text = {p: '\n'.join(cells(p)) for p in NOTEBOOKS}
    layer = {m[1]: p.name.split('_')[0] for p, s in text.items() if (m := re.search(r'#\| default_exp ([\w.]+)', s))}
    found = [(p.name, mod) for p, s in text.items() for mod in re.findall(r'from deepspec\.([\w.]+) import', s)]
    return [(nb, mod) for nb, mod in found if layer.get(mod, '') > nb.split('_')[0]]


def test_arrows_point_down():
    assert upward_imports() == []


@pytest.mark.parametrize('path', NOTEBOOKS, ids=lambda p: p.stem)
def test_notebook_anatomy(path):
    first = cells(path, 'markdown')[0]
    assert re.match(r'# .+\n\n> .+', first), 'a notebook starts with a title and a one-line purpose'
    code = cells(path)
    assert code[0].startswith('#| default_exp ')
    for source in code:
        for line in source.splitlines():
            assert len(line) <= 120 or 'http' in line, f'over 120 columns: {line}'
        if source.startswith('#| export'):
            assert len(source.splitlines()) <= 90, 'an exported cell fits one screen'
            bad = re.findall(r'^\s+assert ', source, flags=re.M)
            assert not bad or '# our own invariant' in source, 'assert in exported code: raise ValueError'


@pytest.mark.parametrize('path', REPORTS, ids=lambda p: p.stem)
def test_report_is_parameterised_and_clean(path):
    notebook = json.loads(path.read_text())
    tagged = [c for c in notebook['cells'] if 'parameters' in c['metadata'].get('tags', [])]
    assert len(tagged) == 1, 'exactly one cell is tagged `parameters`'
    assert not any(c.get('outputs') for c in notebook['cells']), 'reports are committed without outputs'
    assert not any('#| export' in ''.join(c['source']) for c in notebook['cells'])


def test_nothing_names_this_machine():
    "No committed file, nor the pages made of them, holds an absolute path of the machine it was written on"
    names = ('/work/' + 'main', '/work/' + 'scratch', '/work/' + 'wt', '/work/' + 'shared', f'{ROOT}/', sys.executable)
    tracked = [p for d in ('nbs', 'reports', 'docs', 'tests', 'benchmarks') for p in (ROOT/d).rglob('*')
               if p.suffix in ('.ipynb', '.py', '.md') and '_build' not in p.parts]
    assert [str(p) for p in tracked if any(n in p.read_text(encoding='utf-8') for n in names)] == []


@pytest.mark.parametrize('path', NOTEBOOKS, ids=lambda p: p.stem)
def test_imports_have_cells_of_their_own(path):
    "The docs build runs every cell that imports something, so such a cell may do nothing else"
    for source in cells(path):
        lines = [line for line in source.splitlines() if line and not line.startswith(('#', ' ', ')'))]
        imports = [line for line in lines if re.match(r'(import|from) ', line)]
        if imports and 'eval: false' not in source:
            assert len(imports) == len(lines), f'imports and code in one cell: {source[:80]}'
