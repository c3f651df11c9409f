"""The check that counts the kernels' instructions can fail. `make test` runs it for real."""

import copy
import json

import kernel_counts
import pytest

CASE = ("avx2", "matmul Q4_0 n=4")


@pytest.fixture
def check(tmp_path, monkeypatch):
    """check(change, *arguments): exit status where the counts are the recorded ones, but CASE's changed by `change`
    instructions a hundred."""
    recorded = json.loads(kernel_counts.TABLE.read_text())
    key = next(iter(recorded))
    table = tmp_path / "table.json"
    table.write_text(json.dumps(recorded))
    monkeypatch.setattr(kernel_counts.shutil, "which", lambda _: "valgrind")

    def run(change: int, *arguments: str, key: str = key) -> int:
        counts = copy.deepcopy(recorded[next(iter(recorded))])
        counts[CASE[0]][CASE[1]] += counts[CASE[0]][CASE[1]] * change // 100
        monkeypatch.setattr(kernel_counts, "measure", lambda _: (key, counts))
        return kernel_counts.main(["--table", str(table), *arguments])

    run.table = table
    return run


def test_recorded_counts_pass(check, capsys):
    assert check(0) == 0
    assert "within 3%" in capsys.readouterr().out


def test_a_case_that_grew_fails_and_is_named(check, capsys):
    assert check(2) == 0
    capsys.readouterr()
    assert check(5) == 1
    out = capsys.readouterr().out
    assert " ".join(CASE) in out and "--record" in out
    assert out.count("\n") == 2


def test_a_falsified_table_fails(check, capsys):
    table = json.loads(check.table.read_text())
    for part in table.values():
        part[CASE[0]][CASE[1]] = part[CASE[0]][CASE[1]] * 9 // 10
    check.table.write_text(json.dumps(table))
    assert check(0) == 1
    assert " ".join(CASE) in capsys.readouterr().out


def test_a_case_that_shrank_passes_and_says_how_to_keep_it(check, capsys):
    assert check(-10) == 0
    assert "keep that with `python benchmarks/kernel_counts.py --record`" in capsys.readouterr().out


def test_a_missing_case_fails(check, capsys):
    table = json.loads(check.table.read_text())
    for part in table.values():
        del part[CASE[0]][CASE[1]]
    check.table.write_text(json.dumps(table))
    assert check(0) == 1
    assert CASE[1] in capsys.readouterr().out


def test_recording_adds_a_compiler_and_keeps_the_others(check, capsys):
    assert check(0, key="z80 cc-1") == kernel_counts.CANNOT
    assert "z80 cc-1" in capsys.readouterr().out
    before = json.loads(check.table.read_text())
    assert check(5, "--record", key="z80 cc-1") == 0
    after = json.loads(check.table.read_text())
    assert after == before | {"z80 cc-1": after["z80 cc-1"]}
    assert check(5, key="z80 cc-1") == 0


def test_without_valgrind_it_says_so(check, capsys, monkeypatch):
    monkeypatch.setattr(kernel_counts.shutil, "which", lambda _: None)
    assert check(0) == kernel_counts.CANNOT
    assert "no valgrind" in capsys.readouterr().out


def test_a_part_is_read(tmp_path):
    part = tmp_path / "part.1"
    part.write_text("version: 1\nevents: Ir\nsummary: 1234\n\nfn=(1) counted\n3 7\n\ntotals: 1234\n")
    assert kernel_counts.instructions(part) == 1234
    part.write_text("version: 1\n")
    with pytest.raises(SystemExit, match="no totals"):
        kernel_counts.instructions(part)
