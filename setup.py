"Package metadata, read from settings.ini, the one place where it is written"
from configparser import ConfigParser
from pathlib import Path
from shutil import copy

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

cfg = ConfigParser(delimiters=['='], comment_prefixes=(';', '#'))
cfg.read('settings.ini', encoding='utf-8')
meta = cfg['DEFAULT']
STATUS = ['1 - Planning', '2 - Pre-Alpha', '3 - Alpha', '4 - Beta', '5 - Production/Stable', '6 - Mature', '7 - Inactive']


def words(key: str) -> list:
    "Space-separated values of `key`"
    return meta.get(key, '').split()


class BuildWithReports(build_py):
    "The report notebooks go into the package, where an installation without a clone finds them"

    def run(self):
        super().run()
        if self.editable_mode: return # the clone has them
        folder = Path(self.build_lib) / 'deepspec' / 'reports'
        folder.mkdir(parents=True, exist_ok=True)
        for notebook in Path('reports').glob('*.ipynb'): copy(notebook, folder)


extras = {name: words(f'{name}_requirements') for name in ('serve', 'sglang', 'dev')}
setup(
    name=meta['lib_name'], version=meta['version'], description=meta['description'], keywords=meta['keywords'],
    author=meta['author'], author_email=meta['author_email'], license='Apache-2.0', url=meta['git_url'],
    long_description=Path('README.md').read_text(encoding='utf-8') if Path('README.md').exists() else meta['description'],
    long_description_content_type='text/markdown',
    classifiers=[f"Development Status :: {STATUS[int(meta['status'])-1]}", f"Intended Audience :: {meta['audience']}",
                 f"Natural Language :: {meta['language']}", 'Programming Language :: Python :: 3',
                 'Topic :: Scientific/Engineering :: Artificial Intelligence'],
    project_urls={'Documentation': f"{meta['doc_host']}{meta['doc_baseurl']}", 'Source': meta['git_url']},
    packages=find_packages(include=['deepspec', 'deepspec.*']), include_package_data=True,
    package_data={'deepspec': ['py.typed', 'assets/**/*']}, cmdclass={'build_py': BuildWithReports},
    install_requires=words('requirements'), extras_require=extras,
    python_requires=f">={meta['min_python']}", entry_points={'console_scripts': words('console_scripts')},
    zip_safe=False,
)
