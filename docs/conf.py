"Sphinx configuration; build with `python -m deepspec.report.site`"
from configparser import ConfigParser
from pathlib import Path

from docutils import nodes
from docutils.parsers.rst import Directive
from docutils.parsers.rst.directives import unchanged_required

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


class ThemedFigure(Directive):
    "`images/NAME-light.svg` or `images/NAME-dark.svg`, whichever the page's theme asks for, above a caption"
    required_arguments, has_content, option_spec = 1, True, dict(alt=unchanged_required)

    def run(self):
        env, figure = self.state.document.settings.env, nodes.figure(align='center')
        for theme in ('light', 'dark'):
            path = f'/images/{self.arguments[0]}-{theme}.svg'
            env.note_dependency(env.relfn2path(path)[1])
            figure += nodes.image(uri=path, alt=self.options['alt'], classes=[f'only-{theme}'])
        caption, _ = self.state.inline_text(' '.join(self.content), self.lineno)
        figure += nodes.caption('', '', *caption)
        return [figure]


def setup(app): app.add_directive('themed-figure', ThemedFigure)
