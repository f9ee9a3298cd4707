"""Pages of the documentation: each is listed and linked from the first one, and what they name
exists.
"""

import re
from pathlib import Path

import pytest

import aliquot as aq
from aliquot.cluster._file import _Inside, _Main, _OwnDevice, _OwnHost, _Peaks, parse_toml

DOCS = Path(__file__).parents[1] / "docs"
PAGES = sorted(path.name for path in DOCS.glob("*.md"))
NAVIGATION = (DOCS.parent / "mkdocs.yml").read_text()


@pytest.mark.parametrize("page", PAGES)
def test_every_page_is_in_the_navigation_and_linked_from_the_first(page):
    assert f": {page}\n" in NAVIGATION
    assert page == "index.md" or f"({page})" in (DOCS / "index.md").read_text()


@pytest.mark.parametrize("page", PAGES)
def test_links_and_included_files_exist(page):
    text = (DOCS / page).read_text()
    targets = re.findall(r"\]\(([^)#:]+?)(?:#[^)]*)?\)", text)
    included = re.findall(r'^--8<-- "([^"]+)"$', text, re.MULTILINE)
    assert [target for target in targets if not (DOCS / target).exists()] == []
    assert [path for path in included if not (DOCS.parent / path).exists()] == []
    # A formatter that takes an inclusion for Python would break it.
    assert len(re.findall(r"-8 ?<", text)) == len(included)


def test_every_public_name_is_in_the_api_reference():
    text = (DOCS / "api.md").read_text()
    modules = {
        "cluster",
        "core",
        "cost",
        "data",
        "graph",
        "planners",
        "plans",
        "runtime",
        "sharding",
        "zoo",
        "interop",
    }
    public = {name for name in aq.__all__ if name not in modules and not name.startswith("_")}
    assert sorted(name for name in public if not re.search(rf"\b{name}\b", text)) == []


def test_every_cluster_file_of_the_documentation_describes_a_cluster():
    text = "".join((DOCS / page).read_text() for page in PAGES)
    files = re.findall(r"```toml\n(\[cluster\].*?)```", text, re.DOTALL)
    assert len(files) >= 3
    assert [parse_toml(file).num_devices for file in files] == [8, 2, 1, 4]


def test_the_page_of_cluster_files_names_every_key():
    text = (DOCS / "clusters.md").read_text()
    tables = (_Main, _OwnDevice, _Peaks, _Inside, _OwnHost)
    keys = {key for table in tables for key in table.__struct_fields__}
    assert sorted(key for key in keys if f"`{key}`" not in text) == []


def test_the_changes_of_a_version_fit_on_a_screen():
    unreleased = (DOCS.parent / "CHANGELOG.md").read_text().partition("\n## ")[2].partition("\n## ")
    assert len(unreleased[0].splitlines()) <= 60
    assert "benchmarks/results" in (DOCS.parent / "CHANGELOG.md").read_text()
