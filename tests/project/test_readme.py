"""What the README tells a newcomer to type is what runs here and in CI."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def block(name: str) -> str:
    (found,) = re.findall(rf"<!-- {name} command -->\n```sh\n(.*?)\n```", README, re.DOTALL)
    return found


def test_each_command_is_one_line():
    assert block("demo").endswith(" && python3 -m kernops demo")
    assert block("test").endswith(" && python3 -m pytest")
    for name in ("demo", "test"):
        assert "\n" not in block(name)
        assert block(name).startswith("python3 -m pip install -c tests/constraints-cpu.txt ")


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_ci_takes_its_command_from_the_readme():
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert "pytest" not in re.sub(r"#.*", "", script), "it must come from the README alone"
    lines = script[script.index("command=$(sed") : script.index('step "$install"')]
    done = subprocess.run(
        ["bash", "-euc", f'{lines}\necho "$install && $test"'], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == block("test")


def test_the_example_runs():
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert example.count("100_000") == 4  # the three inputs, and the shape in a comment
    names: dict = {}
    exec(compile(example.replace("100_000", "300"), "README.md", "exec"), names)
    x, y, b = (names[name].double() for name in "xyb")
    expected = (-((x[:, None] - y[None]) ** 2).sum(-1) / 0.02).exp() @ b
    assert names["a"].double().sub(expected).abs().max() < 1e-5 * expected.abs().max()
