"Sphinx configuration; build with `python -m deepspec.report.site`"
from configparser import ConfigParser
from pathlib import Path

from docutils import nodes
from docutils.parsers.rst import Directive
from docutils.parsers.rst.directives import unchanged_required
from docutils.utils.math import MathError
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.util import logging

settings = ConfigParser(delimiters=['='], comment_prefixes=(';', '#'))
settings.read(Path(__file__).parent.parent/'settings.ini', encoding='utf-8')
meta = settings['DEFAULT']

project, version, author = meta['lib_name'], meta['version'], meta['author']
copyright = f"{meta['copyright']}"
root_doc = 'index'
extensions = ['myst_nb']
html_math_renderer = 'mathml'
myst_enable_extensions = ['dollarmath', 'colon_fence', 'deflist', 'html_image']
myst_heading_anchors = 3
nb_execution_mode = 'off'  # outputs are stored in the notebooks
exclude_patterns = ['_build', '_outputs', 'toctree.md']
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


def visit_math(self, node):
    "MathML, which browsers draw by themselves: no script from a network that may not be there"
    as_block = isinstance(node, nodes.math_block)
    try: mathml = tex2mathml(node.astext().strip(), as_block=as_block)
    except MathError as err:
        logging.getLogger(__name__).warning('%s in %s', err, node.astext(), location=node)
        raise nodes.SkipNode from err
    self.body.append(f'<div class="math">{mathml}</div>' if as_block else mathml)
    raise nodes.SkipNode


def setup(app):
    app.add_directive('themed-figure', ThemedFigure)
    app.add_html_math_renderer('mathml', (visit_math, None), (visit_math, None))
