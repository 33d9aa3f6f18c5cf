"Sphinx configuration; build with `python -m deepspec.report.site`"
from configparser import ConfigParser
from pathlib import Path

settings = ConfigParser(delimiters=['='], comment_prefixes=(';', '#'))
settings.read(Path(__file__).parent.parent/'settings.ini', encoding='utf-8')
meta = settings['DEFAULT']

project, version, author = meta['lib_name'], meta['version'], meta['author']
copyright = f"{meta['copyright']}"
root_doc = 'index'
extensions = ['myst_nb', 'sphinx.ext.mathjax']
myst_enable_extensions = ['dollarmath', 'colon_fence', 'html_image']
myst_heading_anchors = 3
nb_execution_mode = 'off'  # outputs are stored in the notebooks
exclude_patterns = ['_build', 'toctree.md']
html_theme = 'furo'
html_title = 'deepspec'
html_static_path = ['static']
html_css_files = ['house.css']
pygments_style, pygments_dark_style = 'default', 'monokai'
