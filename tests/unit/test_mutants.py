"""Every bug of ``make mutants`` has its place in the code: who moves the code moves the row, before the night finds out."""

from tests.mutants import mutants
from tests.processes import REPOSITORY


def test_each_bug_has_one_place_and_tests_that_are_there():
    rows = mutants()
    assert len({row.name for row in rows}) == len(rows)
    for row in rows:
        text = (REPOSITORY / "dsframe" / row.file).read_text(encoding="utf-8")
        assert text.count(row.old) == 1, row.name
        assert row.new != row.old, row.name
        assert all((REPOSITORY / name.partition("::")[0]).exists() for name in row.tests if name.endswith(".py")), (
            row.name
        )
