"""Links, paths and words of the documentation lead somewhere."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_links_of_a_page_lead_somewhere(page):
    targets = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text())
    local = [target for target in targets if "://" not in target]
    assert [target for target in local if not (page.parent / target).exists()] == []


@pytest.mark.parametrize("page", ["glossary.md", "architecture.md"])
def test_the_paths_that_a_page_names_exist(page):
    named = re.findall(
        r"`([a-z_]+(?:/[a-z_]+)*(?:\.py|/[a-z_]+|/))`", (ROOT / "docs" / page).read_text()
    )
    roots = (ROOT / "src" / "tensorforge", ROOT / "src", ROOT)
    assert len(named) > 10
    assert [path for path in named if not any((root / path).exists() for root in roots)] == []


def test_the_words_of_the_glossary_are_in_order_and_in_use():
    sections = (ROOT / "docs" / "glossary.md").read_text().split("\n## ")[1:]
    source = "\n".join(path.read_text() for path in (ROOT / "src").rglob("*.py")).lower()
    for section in sections:
        words = re.findall(r"^\| ([\w -]+?)(?: \(.+?\))? \| \S", section, re.MULTILINE)[1:]
        assert len(words) > 3, section.splitlines()[0]
        assert words == sorted(words)
        assert [word for word in words if word.split()[0] not in source] == []
