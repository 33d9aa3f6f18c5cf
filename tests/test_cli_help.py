"Every command of the tree: its help, its example, its flags and its answer to a wrong one"
import re
import shlex
import subprocess
import sys

import pytest
from conftest import ROOT
from typer.main import get_command

from deepspec.cli.main import app, main

ROOT_COMMAND = get_command(app)
PASSES_THROUGH = ('babilong', 'train')  # its flags are the trainer's


def walk(command, path=()):
    "(path, command) of every leaf below a command"
    if not hasattr(command, 'commands'): return [(path, command)]
    return [leaf for name in command.list_commands(None) for leaf in walk(command.commands[name], (*path, name))]


LEAVES = walk(ROOT_COMMAND)
GROUPS = [(), *sorted({path[:-1] for path, _ in LEAVES} - {()})]
EACH = pytest.mark.parametrize('path, command', LEAVES, ids=[' '.join(p) for p, _ in LEAVES])


def run(argv, capsys):
    "Exit code and what was printed"
    with pytest.raises(SystemExit) as end: main(argv)
    printed = capsys.readouterr()
    return end.value.code or 0, printed.out, printed.err


def parse(argv):
    "The leaf's context for a command line; raises what the parser refuses"
    context, rest = None, list(argv)
    command, name = ROOT_COMMAND, 'deepspec'
    while hasattr(command, 'commands'):
        context = command.make_context(name, rest, parent=context)
        name, command, rest = command.resolve_command(context, [*context._protected_args, *context.args])
    return command.make_context(name, rest, parent=context)


def example_of(command):
    "Words of the example behind `deepspec`"
    found = re.fullmatch(r'\x08\nExample: deepspec (.+)', command.epilog)
    return shlex.split(found[1])


def flags(command):
    "{--flag: parameter} of a command"
    return {o: p for p in command.params for o in p.opts if o.startswith('--')}


def test_no_command_is_missing_from_the_listed_order():
    assert set(ROOT_COMMAND.list_commands(None)) == set(ROOT_COMMAND.commands)


@EACH
def test_help_says_what_it_does_and_shows_an_example(path, command, capsys):
    code, out, _ = run([*path, '--help'], capsys)
    assert code == 0 and f"Example: deepspec {shlex.join(example_of(command))}" in out
    assert run([*path, '-h'], capsys)[1] == out
    assert command.help and not command.help.endswith('.')
    assert all(p.help for p in command.params if p.name not in ('help', 'context')), 'a flag without a word about it'


@EACH
def test_the_example_parses(path, command):
    words = example_of(command)
    assert tuple(words[:len(path)]) == path
    parsed = parse(words)
    if path == PASSES_THROUGH:
        from deepspec.longmem.train import parse_training_args
        assert parse_training_args(parsed.args).train_base
    else: assert parsed.command is command


@EACH
def test_a_wrong_flag_is_one_line_and_exit_code_2(path, command, capsys):
    code, out, err = run([*path, '--unheard-of', '1'], capsys)
    assert code == 2 and out == '' and err.startswith('deepspec: ') and err.count('\n') == 1
    assert re.search('unheard.of', err)


@pytest.mark.parametrize('path', GROUPS, ids=lambda p: ' '.join(p) or 'deepspec')
def test_a_list_of_commands_fits_a_screen(path, capsys, monkeypatch):
    monkeypatch.setenv('COLUMNS', '80')
    code, out, _ = run([*path, '--help'], capsys)
    lines = out.splitlines()
    assert code == 0 and len(lines) <= 35 and max(map(len, lines)) <= 80
    assert not [line for line in lines if line.endswith('...') and 'Usage' not in line], 'a cut sentence'
    assert run([*path, 'no-such-command'], capsys)[0] == 2


def test_one_flag_has_one_type_and_one_meaning():
    "The same flag takes the same kind of value everywhere; the shared ones are explained in the same words"
    found, kinds = {}, {}
    for path, command in LEAVES:
        context = command.make_context('x', [], resilient_parsing=True)
        for flag, p in flags(command).items():
            found.setdefault(flag, {})[path] = p
            value = p.get_help_record(context)[0].split(flag)[-1]  # such as ` <int>`
            kinds.setdefault(flag, set()).add(re.sub(r'list\[(.*)\]', r'\1', value))
    assert {f: k for f, k in kinds.items() if len(k) > 1} == {}
    for flag in ('--json', '--dry-run', '--device', '--dtype', '--template', '--layers', '--server-address', '--row', '--num-prompts',
                 '--temperature', '--max-new-tokens', '--multi-turn'):
        words = {p.help for path, p in found[flag].items() if path != ('regenerate',) or flag != '--temperature'}
        assert len(words) == 1, (flag, words)


def test_what_is_long_has_a_dry_run_and_what_is_counted_has_json():
    by_path = {' '.join(path): flags(command) for path, command in LEAVES}
    long = ('quickstart', 'serve', 'regenerate', 'cache build', 'train', 'evaluate', 'babilong train')
    assert [c for c in long if '--dry-run' not in by_path[c]] == []
    spoken = ('serve', 'mask show', 'babilong show')  # addresses as they come up, pictures
    assert [c for c, known in by_path.items() if '--json' not in known and c not in spoken] == []


@pytest.mark.parametrize('shell', ['bash', 'zsh', 'fish'])
def test_a_shell_can_complete_commands(shell):
    done = subprocess.run([sys.executable, '-m', 'deepspec', '--show-completion', shell], capture_output=True, text=True)
    assert done.returncode == 0 and '_DEEPSPEC_COMPLETE=' in done.stdout.upper() and 'deepspec' in done.stdout


def test_help_alone_is_a_mistake_of_usage_and_version_is_not(capsys):
    code, out, err = run([], capsys)
    assert code == 2 and 'quickstart' in out + err
    assert run(['--version'], capsys)[:2] == (0, f"deepspec {__import__('deepspec').__version__}\n")


def test_python_m_deepspec_is_the_command():
    asked = [subprocess.run([sys.executable, '-m', m, 'plan', '--help'], capture_output=True, text=True).stdout
             for m in ('deepspec', 'deepspec.cli.main')]
    assert asked[0] == asked[1] != ''


def guide():
    return (ROOT/'docs'/'guides'/'command-line.md').read_text(encoding='utf-8')


def test_the_guide_lists_the_commands_in_their_order():
    rows = [line for line in guide().splitlines() if line.startswith('| `deepspec ')]
    named = [tuple(c.split()) for row in rows for c in re.findall(r'`deepspec ([a-z ]+)`', row)]
    assert named == [path for path, _ in LEAVES]


def test_the_guide_names_every_dry_run():
    row = next(line for line in guide().splitlines() if line.startswith('| `--dry-run`'))
    assert set(re.findall(r'`([a-z ]+)`', row)) == {' '.join(p) for p, c in LEAVES if '--dry-run' in flags(c)}


@pytest.mark.parametrize('name', ['README.md', *(f'docs/guides/{p.name}' for p in sorted((ROOT/'docs'/'guides').glob('*.md')))])
def test_command_lines_in_the_docs_parse(name):
    "Every `deepspec …` line of a bash block is accepted by today's parser"
    blocks = re.findall(r'```(?:bash|sh)\n(.*?)```', (ROOT/name).read_text(encoding='utf-8'), re.S)
    for block in blocks:
        for line in re.sub(r'\\\n\s*', ' ', block).splitlines():
            found = re.search(r'(?:^|&& |\$\()(?:(?:torchrun .*?-m |python -m )?deepspec|run) (?![.(])(.*)', line)
            if not found or '…' in line: continue
            text = re.split(r' &| \||>|\)$|#', re.sub(r'\$\(for .*done\)| \$[a-z]+', '', found[1]))[0]
            parse([w for w in shlex.split(text) if w not in ('--version', '--help')])
