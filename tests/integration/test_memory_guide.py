"""The guide's examples run as they stand."""

import re
from pathlib import Path

import pytest

GUIDE = Path(__file__).parents[2] / "docs" / "memory.md"
EXAMPLES = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)


@pytest.mark.parametrize("code", EXAMPLES, ids=range(len(EXAMPLES)))
def test_an_example_runs(code, capsys):
    exec(compile(code, str(GUIDE), "exec"), {})
    assert capsys.readouterr().out == ""
