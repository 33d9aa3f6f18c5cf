"Draw the figures of the guides again: `python docs/draw_figures.py`"
import sys
from pathlib import Path

from deepspec.longmem.pictures import MEMORY_FIGURES
from deepspec.report.concepts import CONCEPT_FIGURES, write_figures

if __name__ == '__main__':
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent/'images'
    for path in write_figures(CONCEPT_FIGURES | MEMORY_FIGURES, folder): print(path)
