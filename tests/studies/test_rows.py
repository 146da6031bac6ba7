import math
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from studies.rows import Measured, RowFile
from tests.studies.test_study import Case, Result

numbers = st.floats(allow_nan=False)


@settings(max_examples=30, deadline=None)
@given(
    number=st.integers(-(10**12), 10**12),
    offset=numbers,
    label=st.none() | st.text(st.characters(codec="utf-8", exclude_characters="\r")),
    square=numbers,
    history=st.lists(numbers),
)
def test_rows_come_back_from_the_file_exactly(
    tmp_path_factory, number: int, offset: float, label: str | None,
    square: float, history: list[float],
) -> None:  # fmt: skip
    path = tmp_path_factory.mktemp("rows") / "rows.csv"
    case = Case(number, offset, "odd", label)
    row = Measured(Result(square, history), 1.25, 'a "CPU", 2 threads', "abc-dirty")
    table = RowFile(path, Case, Result)
    assert table.read() == {}
    table.append(case, row)
    table.append(replace(case, number=number + 1), row)
    assert table.read() == {case: row, replace(case, number=number + 1): row}


def test_nan_is_written_and_read_as_nan(tmp_path) -> None:
    table = RowFile(tmp_path / "rows.csv", Case, Result)
    table.read()
    table.append(Case(1, 0.0, "odd", None), Measured(Result(math.nan, [math.inf]), 0.0, "", ""))
    (row,) = table.read().values()
    assert math.isnan(row.result.square)
    assert row.result.history == [math.inf]
