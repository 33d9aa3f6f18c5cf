"""Run the lessons of the notebooks against the exported package, for coverage

`nbdev_test` runs a notebook's exported cells where they stand, so the package itself is not loaded. Here each exported cell brings in
the names of the module instead, and everything else runs as it is."""
import argparse
import concurrent.futures
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
OWN = ('__name__', '__doc__', '__file__', '__spec__', '__loader__', '__package__', '__builtins__', '__cached__')  # of the lesson itself
SKIP = re.compile(r'^#\| *(eval: *false|slow|gpu|notest|export|hide_line)', re.M)


def lesson(path):
    "Code cells of a notebook, exported ones replaced by the module's names"
    cells = [''.join(c['source']) for c in json.loads(path.read_text(encoding='utf-8'))['cells'] if c['cell_type'] == 'code']
    module = f"deepspec.{re.match(r'#[|] default_exp ([^ ]+)', cells[0].splitlines()[0])[1]}"
    names = (f"import importlib as _i; globals().update({{k: v for k, v in vars(_i.import_module({module!r})).items() "
             f"if k not in {OWN!r}}})")
    return [names, *(source for source in cells[1:] if not SKIP.search(source))]


def run(path):
    "Name of the notebook, and the last line of its error if it failed"
    with tempfile.TemporaryDirectory() as folder:
        cells = Path(folder)/'cells.json'
        cells.write_text(json.dumps(lesson(path)))
        done = subprocess.run([sys.executable, '-m', 'coverage', 'run', ROOT/'tests'/'run_lessons.py',
                               '--cells', cells], cwd=ROOT, capture_output=True, text=True, env=os.environ | dict(IN_TEST='1'))
    return path.stem, '' if done.returncode == 0 else (done.stderr.strip().splitlines() or ['failed'])[-1]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('paths', nargs='*', type=Path, help='notebooks; all by default')
    parser.add_argument('--cells', help='file with the cells of one notebook, run in this process')
    given = parser.parse_args()
    if given.cells:
        from execnb.shell import CaptureShell
        os.chdir(ROOT/'nbs')
        shell = CaptureShell()
        for source in json.loads(Path(given.cells).read_text()):
            shell.run(source)
            if shell.exc: raise shell.exc
        return
    paths = given.paths or sorted((ROOT/'nbs').glob('[0-9]*.ipynb'))
    with concurrent.futures.ThreadPoolExecutor(2) as pool: found = dict(pool.map(run, paths))
    for name, error in found.items():
        if error: print(f'{name}: {error}', file=sys.stderr)
    raise SystemExit(1 if any(found.values()) else 0)


if __name__ == '__main__': main()
