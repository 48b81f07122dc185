"""What every experiment leaves, and when it is read instead of run."""

import dataclasses
import json
import pathlib

import numpy as np
import pytest
from matplotlib.figure import Figure

from minigpt_jax import experiment

OUTCOME = experiment.Outcome(
    tables=[('A table', ['n', 'value'], [['1', '0.50'], ['2', '0.10']])],
    numbers={'values': np.array([0.5, 0.1]), 'count': np.int64(2)},
    claims=[experiment.Claim('B2', 'It falls', '.5 → .1', '0.50 → 0.10', 'holds')],
    figure=Figure(),
)


@pytest.fixture
def script(tmp_path):
    path = tmp_path / 'falling.py'
    path.write_text('"""Does it fall?"""\n')
    return path


def test_leaves_every_number_a_picture_and_where_they_are_from(script, tmp_path):
    record = experiment.run(script, lambda setting: OUTCOME, tmp_path, quick=False)
    assert json.loads((tmp_path / 'falling.json').read_text()) == record
    assert record['numbers'] == {'values': [0.5, 0.1], 'count': 2}
    assert (tmp_path / 'falling.png').read_bytes().startswith(b'\x89PNG')
    assert 'jax' in record['environment']['packages']
    text = experiment.describe(record)
    assert '2    0.10' in text
    assert 'B2: It falls\n   there: .5 → .1\n   here:  0.50 → 0.10\n   → holds' in text


def test_is_read_again_only_if_it_is_of_the_same_code_and_size(script, tmp_path):
    assert experiment.read(script, tmp_path, quick=False) is None
    record = experiment.run(script, lambda setting: OUTCOME, tmp_path, quick=False)
    assert experiment.read(script, tmp_path, quick=False) == record
    assert experiment.read(script, tmp_path, quick=True) is None
    (tmp_path / 'falling.png').rename(tmp_path / 'away.png')
    assert experiment.read(script, tmp_path, quick=False) is None
    (tmp_path / 'away.png').rename(tmp_path / 'falling.png')
    script.write_text('"""Does it rise?"""\n\n\ndef f():\n    """No."""  # at all\n')
    assert experiment.read(script, tmp_path, quick=False) is None
    record = experiment.run(script, lambda setting: OUTCOME, tmp_path, quick=False)
    script.write_text('"""It does."""\ndef f():\n    """Yes."""\n')
    assert experiment.read(script, tmp_path, quick=False) == record


def test_the_digest_is_of_the_code_that_computes():
    file = pathlib.Path(experiment.__file__)
    assert experiment.code_hash(file) != experiment.code_hash(file.with_name('cli.py'))


def test_the_digest_is_of_the_configurations_that_the_script_starts_from(tmp_path):
    (tmp_path / 'a.py').write_text('from configs import b\nsize = 1\n')
    (tmp_path / 'b.py').write_text('size = 2\n')
    (tmp_path / 'c.py').write_text('size = 3\n')
    script = tmp_path / 'script.py'
    script.write_text('import pathlib\nfrom configs import a\n')
    assert experiment.configurations(script, tmp_path) == {tmp_path / 'a.py', tmp_path / 'b.py'}


def test_runs_of_another_package_or_size_are_kept_apart(script, tmp_path, monkeypatch):
    seen = []

    def measure(setting):
        seen.append((setting.quick, setting.workdir))
        return OUTCOME

    for quick in (False, True):
        experiment.run(script, measure, tmp_path, quick=quick)
    script.write_text('rises = True\n')
    experiment.run(script, measure, tmp_path, quick=False)
    monkeypatch.setattr(experiment, '_package', list)
    experiment.run(script, measure, tmp_path, quick=False)
    assert [quick for quick, _ in seen] == [False, True, False, False]
    workdirs = [workdir for _, workdir in seen]
    assert workdirs[0] == workdirs[2]
    assert len(set(workdirs)) == 3


def test_a_damaged_record_is_none(script, tmp_path):
    experiment.run(script, lambda setting: OUTCOME, tmp_path, quick=False)
    path = tmp_path / 'falling.json'
    good = path.read_text()
    damaged = ['{"experiment": "fal', '[]', '', '[' * 10**5, good.replace('claims', 'claim')]
    damaged += [good.replace('"holds"', '"perhaps"'), good.replace('"text"', '"texts"')]
    damaged += [good.replace('finished', 'ended'), good.replace('environment', 'machine')]
    for text in damaged:
        path.write_text(text)
        assert experiment.read(script, tmp_path, quick=False) is None
    path.write_text(good)
    assert experiment.read(script, tmp_path, quick=False) is not None
    (tmp_path / 'falling.png').write_bytes(b'')
    assert experiment.read(script, tmp_path, quick=False) is None


def test_what_is_smaller_is_not_judged_and_replaces_no_whole_result(script, tmp_path):
    whole = experiment.run(script, lambda setting: OUTCOME, tmp_path, quick=False)
    quick = experiment.run(script, lambda setting: OUTCOME, tmp_path, quick=True)
    part = experiment.run(
        script, lambda setting: OUTCOME, tmp_path, quick=False, options={'batch': 1}
    )
    assert experiment.read(script, tmp_path, quick=False) == whole
    assert experiment.read(script, tmp_path, quick=True) == quick
    assert json.loads((tmp_path / 'falling-batch-1.json').read_text()) == part
    verdicts = [record['claims'][0]['verdict'] for record in (whole, quick)]
    assert verdicts == ['holds', 'not decided']
    same = dataclasses.replace(OUTCOME, whole=True)
    record = experiment.run(script, lambda setting: same, tmp_path, quick=True)
    assert record['claims'][0]['verdict'] == 'holds'


def test_a_place_that_cannot_be_written_to_is_refused_before_the_work(script, tmp_path):
    (tmp_path / 'file').write_text('')
    with pytest.raises(OSError, match='file'):
        experiment.run(script, None, tmp_path / 'file', quick=False)


def test_a_verdict_is_one_of_the_known():
    with pytest.raises(ValueError, match="verdict='perhaps': choose from"):
        experiment.Claim('A', 'x', '', '', 'perhaps')


def test_jobs_run_once_each_in_order_of_their_results():
    seen = []

    def double(x):
        seen.append(x)
        return 2 * x

    assert experiment.on_all_devices(double, [(x,) for x in range(20)]) == list(range(0, 40, 2))
    assert sorted(seen) == list(range(20))


def test_timed_functions_take_turns_and_warm_ups_are_not_counted():
    seen = []
    functions = {'a': lambda: seen.append('a'), 'b': lambda: seen.append('b')}
    seconds = experiment.interleaved_times(functions, rounds=3, warm_ups=2)
    assert seen == ['a', 'b'] * 5
    assert {name: x.shape for name, x in seconds.items()} == {'a': (3,), 'b': (3,)}
