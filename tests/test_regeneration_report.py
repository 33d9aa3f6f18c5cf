"The regeneration report, executed by papermill from the files of a small run"
import json

import papermill
from conftest import ROOT
from fake_server import FakeServer

from deepspec.data.regenerate import Patience, regenerate


def record_run(folder):
    "40 rows, of which 4 are refused and 4 are cut, answered by two servers; the summary"
    marks = {1: '#400', 2: '#length'}
    rows = [dict(id=f'r{i}', conversations=[dict(role='user', content=f'question {i} {marks.get(i % 10, "")}'),
                                            dict(role='assistant', content=f'old | answer {i}')]) for i in range(40)]
    (folder/'train.jsonl').write_text(''.join(json.dumps(r) + '\n' for r in rows))
    with FakeServer(latency_s=.05) as a, FakeServer(latency_s=.05) as b:
        return regenerate(folder/'train.jsonl', folder/'new'/'train.jsonl', [a.url, b.url], sampling='qwen3', window=2,
                          seed=5, patience=Patience(sync_s=.1))


def test_report_shows_the_run(tmp_path):
    summary = record_run(tmp_path)
    given = dict(original=str(tmp_path/'train.jsonl'), regenerated=str(tmp_path/'new'/'train.jsonl'), num_samples=3)
    report = ROOT/'reports'/'regeneration.ipynb'
    done = papermill.execute_notebook(report, tmp_path/'report.ipynb', given, progress_bar=False)
    outputs = [o for c in done.cells for o in c.get('outputs', ())]
    figures = [o for o in outputs if 'image/png' in o.get('data', {})]
    said = '\n'.join(''.join(o['data'].get('text/markdown', '')) for o in outputs if 'data' in o)
    assert len(figures) == 2 and all(len(o['data']['image/png']) > 5000 for o in figures)
    assert said.count('n = 36 rows, 4 rejected, seed 5') == 2 # under each figure
    shown = [json.loads(line) for line in (tmp_path/'new'/'train.jsonl').read_text().splitlines()[:3]]
    for row in shown: # side by side, with the bar of the old answer made harmless
        assert f"| old \\| answer {row['id'][1:]} | {row['conversations'][-1]['content']} |" in said
    assert summary.finish_reasons == {'stop': 32, 'length': 4} and summary.reject_reasons == {'refused_by_server': 4}
    assert not any(o['output_type'] == 'error' for o in outputs)
