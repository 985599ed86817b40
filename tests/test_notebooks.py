"""Notebooks: their form in every run; with -m notebooks each is executed from a clean kernel and says what is stored in it. Floor 9."""
import ast
import json
import re
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "notebooks"
PATHS = sorted(FOLDER.glob("*.ipynb"))
every_notebook = pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)


def read(path):
    return json.loads(path.read_text(encoding="utf-8"))


def source(cell):
    return "".join(cell["source"])


def said(cell):
    """What a cell printed and gave, as text. Of pictures only that there is one: their bytes depend on fonts."""
    parts = []
    for output in cell.get("outputs", ()):
        if output["output_type"] == "stream":
            parts.append("".join(output["text"]))
        elif "image/png" in output.get("data", {}):
            parts.append("<picture>")
        else:
            parts.append("".join(output["data"]["text/plain"]))
    return "".join(parts)


def test_they_are_ten_in_reading_order():
    assert [path.stem[:2] for path in PATHS] == [f"{i:02}" for i in range(10)]


@every_notebook
def test_a_notebook_is_small_plain_and_without_traces_of_who_ran_it(path):
    text = path.read_text(encoding="utf-8")
    assert len(text) < 60_000
    assert not re.search(r"/(home|root|tmp|work|Users)/|https?://|0x[0-9a-f]{8}", text)
    book = read(path)
    assert book["metadata"] == {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
                                "language_info": {"name": "python"}}
    for cell in book["cells"]:
        if cell["cell_type"] == "code":
            assert cell["execution_count"] is None and not any(o.get("execution_count") for o in cell["outputs"])
            assert all(o["output_type"] != "error" and o.get("name") != "stderr" for o in cell["outputs"])
            tree = ast.parse(source(cell))
            private = [node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr.startswith("_")
                       and not node.attr.startswith("__") and node.attr != "_fields" and not (isinstance(node.value, ast.Name) and node.value.id == "self")]
            assert not private, private
            assert len(said(cell)) < 4000
    assert len({cell["id"] for cell in book["cells"]}) == len(book["cells"])


@every_notebook
def test_a_notebook_ends_with_two_exercises_whose_answers_assert(path):
    cells = read(path)["cells"]
    assert "## Exercises" in source(cells[-4]) and "**1.**" in source(cells[-4]) and source(cells[-2]).startswith("**2.**")
    for cell in (cells[-3], cells[-1]):
        assert any(isinstance(node, ast.Assert) for node in ast.walk(ast.parse(source(cell))))


@every_notebook
def test_a_notebook_works_on_the_real_thing_and_first_says_what_it_is(path):
    cells = read(path)["cells"]
    assert source(cells[0]).startswith(f"# {path.stem[:2]} · ")
    assert any(re.search(r"^(import|from) refengine", source(cell), re.M) for cell in cells if cell["cell_type"] == "code")


@pytest.mark.notebooks
@every_notebook
def test_a_notebook_runs_from_a_clean_kernel_and_says_what_is_stored(path):
    import nbclient
    import nbformat

    stored = read(path)
    book = nbformat.read(path, 4)
    for cell in book.cells:
        cell.pop("outputs", None)
        if cell.cell_type == "code":
            cell.outputs = []
    nbclient.NotebookClient(book, timeout=120, resources={"metadata": {"path": str(FOLDER)}}).execute()
    for cell, was in zip(book.cells, stored["cells"]):
        assert said(cell) == said(was), f"stale: {source(was)[:80]}"
