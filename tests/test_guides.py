"The guides' figures say what the code draws today; every file and notebook that the guides name exists"
import ast
import json
import re
import shlex
import subprocess
from dataclasses import fields

import pytest
import yaml
from conftest import ROOT

from deepspec.cli.main import main
from deepspec.longmem.pictures import MEMORY_FIGURES
from deepspec.longmem.train import TrainingConfig
from deepspec.report.concepts import CONCEPT_FIGURES, THEMES, figure_texts, write_figures
from deepspec.report.render import report_parameters
from deepspec.report.site import page_name, read_parts

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


def test_every_notebook_stands_in_one_part_of_the_navigation():
    pages = {page_name(p)[:-6]: (p.stem, '') for p in (ROOT/'nbs').glob('[0-9]*.ipynb')}
    assert sum(len(part['pages']) for part in read_parts(ROOT/'docs'/'parts.yml', pages)) == len(pages)


SEED_NAMES = '''
download_and_split.py generate_train_data.py prepare_target_cache.py launch_sglang_server.sh prepare_data.sh
target_cache_dataset.py jsonl_dataset.py parser.py cuda_prefetcher.py base_trainer.py base_evaluator.py DSpark_paper.pdf
scripts/data/README.md open-perfectblend human/gpt/chatgpt/bing/bard conversations turns test_size --temperature --top-p
--top-k --min-p --disable-thinking --resume 30000–30007 logs/sglang_ target_layer_ids target_last_hidden_states
compute_local_sample_range samples.idx INDEX_RECORD_STRUCT <QIIQQQQQ 56 38 AsyncTargetCacheWriter max_queue_size
max_shard_bytes validate_target_cache_manifest validate_train_cache CacheDataset max_open_shards __getstate__
CacheCollator CUDAPrefetcher record_stream move_batch_to_device ChatTemplate TEMPLATE_REGISTRY qwen gemma4
assistant_loss_prefix JsonLineDataset ~/.cache/deepspec mtime_ns bisect_right assert_no_final_target_layer
saved_world_size train_qwen_titans_babilong.py QwenTitansForBABILong BABILongDataset data_path qa1/32k.json max_length
answer_reserve_tokens add_special_tokens available labels attention_mask pad_token batch_size num_workers train_ratio
random_split DistributedSampler set_epoch chunk_size gradient_accumulation_steps log_every_batches logging_steps --fsdp
--max_samples --num_epochs --eval_steps outputs/qwen_titans_babilong final_memory_checkpoint.pt memory_state_dict
long_term_memory memory_gate global_step
'''.split()


def map_text():
    return (ROOT/'docs'/'guides'/'seed-map.md').read_text(encoding='utf-8')


def dead_pointers(text):
    "Notebooks, pages, reports, modules and commands that a guide names and the repository lacks"
    from typer.main import get_command

    from deepspec.cli.main import app
    pages = {re.sub(r'^\d+[a-z]*_', '', p.stem): p.stem for p in (ROOT/'nbs').glob('[0-9]*.ipynb')}
    dead = [n for n in re.findall(r'\b(\d\d[a-z]?_[a-z_]+)\b', text) if not (ROOT/'nbs'/f'{n}.ipynb').exists()]
    dead += [p for p in re.findall(r'\]\(\.\./nbs/(\w+)\.ipynb', text) if p not in pages]
    dead += [p for p in re.findall(r'\]\(([\w-]+\.md)\)', text) if not (ROOT/'docs'/'guides'/p).exists()]
    dead += [p for p in re.findall(r'\b(reports/\w+\.ipynb)', text) if not (ROOT/p).exists()]
    dead += [m for m in re.findall(r'python -m (deepspec[\w.]+)', text)
             if not (ROOT/(m.replace('.', '/') + '.py')).exists()]
    for words in re.findall(r'`deepspec ((?:[a-z]+ ?)+)', text):
        at = get_command(app)
        for word in words.split():
            if not hasattr(at, 'commands'): break
            if word not in at.commands:
                dead.append(f'deepspec {words}')
                break
            at = at.commands[word]
    return dead


def test_seed_map_names_everything_the_documents_name():
    assert [n for n in SEED_NAMES if n not in map_text()] == []


@pytest.mark.parametrize('path', GUIDES, ids=lambda p: p.stem)
def test_guides_point_at_things_that_exist(path):
    assert dead_pointers(path.read_text(encoding='utf-8')) == []


def test_a_dead_pointer_is_found():
    assert dead_pointers('see `99_nothing`, [x](../nbs/nothing.ipynb), [y](gone.md), `deepspec cache burn a`') == [
        '99_nothing', 'nothing', 'gone.md', 'deepspec cache burn a']


def test_seed_map_links_each_notebook_to_its_own_page():
    found = re.findall(r'\[`(\w+)`\]\(\.\./nbs/(\w+)\.ipynb\)', map_text())
    assert found and [n for n, page in found if re.sub(r'^\d+[a-z]*_', '', n) != page] == []


def raised_texts():
    "The text of every error that the package raises, with `…` where a value stands"
    def text(node):
        if isinstance(node, ast.Constant): return str(node.value)
        return ''.join(map(text, node.values)) if isinstance(node, ast.JoinedStr) else '…'
    trees = [ast.parse(p.read_text(encoding='utf-8')) for p in (ROOT/'deepspec').rglob('*.py')]
    return [text(n) for tree in trees for n in ast.walk(tree) if isinstance(n, ast.Constant | ast.JoinedStr)]


def test_every_line_of_the_troubleshooting_page_is_raised_somewhere():
    page = (ROOT/'docs'/'guides'/'troubleshooting.md').read_text(encoding='utf-8')
    rows = [re.findall(r'`([^`]+)`', row) for row in re.findall(r'^\| (`.*?) \|', page, re.M)]
    raised = raised_texts()
    assert len(rows) > 40
    assert [r for r in rows if not any(all(part in text for part in r) for text in raised)] == []


def test_the_troubleshooting_page_names_options_that_exist():
    from typer.main import get_command

    from deepspec.cli.main import app
    def options(command):
        if hasattr(command, 'commands'): return set().union(*map(options, command.commands.values()))
        return {o for p in command.params for o in (*p.opts, *p.secondary_opts)}
    page = (ROOT/'docs'/'guides'/'troubleshooting.md').read_text(encoding='utf-8')
    named = set(re.findall(r'`(--[a-z_-]+)', page))
    known = options(get_command(app)) | {f'--{f.name}' for f in fields(TrainingConfig)}
    assert len(named) > 10 and named - known == {'--nproc_per_node', '--help'} # torchrun's, and an engine's


GPU_GUIDE = (ROOT/'docs'/'guides'/'gpu-nodes.md').read_text(encoding='utf-8')


@pytest.fixture(scope='module')
def qwen3_4b(tmp_path_factory):
    "A folder with the numbers of Qwen3-4B's configuration that a plan needs"
    folder = tmp_path_factory.mktemp('qwen3_4b')
    (folder/'config.json').write_text(json.dumps(dict(
        model_type='qwen3', hidden_size=2560, num_hidden_layers=36, num_attention_heads=32, num_key_value_heads=8, head_dim=128,
        vocab_size=151936, architectures=['Qwen3ForCausalLM'])))
    return folder


def printed_plan(folder, capsys, **changes):
    "What the guide's plan prints, without the lines about this machine's disk"
    given = dict(target=folder, layers='1,9,17,25,33', num_samples=1_300_000, tokens_per_sample=1200, tokens_per_s=100_000) | changes
    with pytest.raises(SystemExit): main(['plan', *(str(x) for k, v in given.items() for x in (f"--{k.replace('_', '-')}", v))])
    lines = capsys.readouterr().out.splitlines()
    return '\n'.join(line for line in lines if not line.startswith(('free space', 'would fit')))


def test_the_gpu_guide_shows_the_plan_that_is_printed(qwen3_4b, capsys):
    assert printed_plan(qwen3_4b, capsys) == re.search(r'```text\n(.*?)\n```', GPU_GUIDE, re.S)[1]
    rows = re.findall(r'^\| ([\d,]+) \| ([\d.]+ h) \| ([\d.]+) GB \|$', GPU_GUIDE, re.M)
    assert len(rows) == 3
    for speed, hours, written in rows:
        tokens_per_s = int(speed.replace(',', ''))
        assert f'time                  {hours} at {speed} tokens/s' in printed_plan(qwen3_4b, capsys, tokens_per_s=tokens_per_s)
        assert f'{tokens_per_s*30_726/1e9:.2f}' == written
    assert 'total                 3.7 TB' in printed_plan(qwen3_4b, capsys, num_samples=100_000) and '100,000 samples are 3.7 TB' in GPU_GUIDE


@pytest.mark.parametrize('path', [ROOT/'README.md', *GUIDES], ids=lambda p: p.stem)
def test_papermill_lines_name_parameters_that_exist(path):
    text = re.sub(r'\\\n\s*', ' ', path.read_text(encoding='utf-8'))
    for line in re.findall(r'^papermill (.*)$', text, re.M):
        words = shlex.split(line)
        known = report_parameters(ROOT/words[0])
        given = [words[i + 1] for i, w in enumerate(words) if w == '-p']
        given += [k for i, w in enumerate(words) if w == '-y' for k in yaml.safe_load(words[i + 1])]
        assert given and [g for g in given if g not in known] == []


def test_the_slurm_scripts_are_scripts():
    scripts = [b for b in re.findall(r'```bash\n(.*?)```', GPU_GUIDE, re.S) if b.startswith('#!')]
    assert len(scripts) == 2
    for script in scripts:
        assert subprocess.run(['bash', '-n'], input=script, text=True).returncode == 0
        for flag in re.findall(r'^#SBATCH (.*)$', script, re.M): assert all(w.startswith('--') for w in flag.split())
