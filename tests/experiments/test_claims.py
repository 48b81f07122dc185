"""One table of all claims, from what the experiments left."""

import json

import pytest

from experiments import claims, worked_example
from minigpt_jax import experiment


@pytest.fixture
def setting(tmp_path, monkeypatch):
    monkeypatch.setattr(claims, 'EXPERIMENTS', ('worked_example',))
    return experiment.Setting(quick=True, out=tmp_path, workdir=tmp_path / 'runs')


def test_claims_are_those_of_the_experiments_and_what_is_open(setting):
    outcome = claims.measure(setting)
    record = json.loads((setting.out / 'worked_example-quick.json').read_text())
    ((_, headers, rows),) = outcome.tables
    assert len(rows) == len(record['claims']) + len(claims.OPEN)
    assert {row[headers.index('verdict')] for row in rows} == {'holds', 'open'}
    assert {row[headers.index('experiment')] for row in rows} == {'worked_example', ''}
    page = (setting.out / 'claims-quick.md').read_text().splitlines()
    assert len(page) == 2 + len(rows)
    assert all(line.count('|') == len(headers) for line in page)  # without the age


def test_what_is_there_is_read_and_not_measured_again(setting, monkeypatch):
    first = claims.measure(setting)
    monkeypatch.setattr(worked_example, 'measure', None)
    assert claims.measure(setting).numbers == first.numbers


def test_every_experiment_that_there_is_has_its_claims_in_the_table():
    scripts = {
        path.stem for path in claims.HERE.glob('*.py') if 'def measure(' in path.read_text('utf-8')
    }
    # The benchmark is held against bounds of this project, not against the articles.
    assert scripts - {'claims', 'benchmark'} == set(claims.EXPERIMENTS)
