"""The pages of the documentation, and what is in them: fenced blocks, tables, links and headings."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted([*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"])


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block; ``line`` is that of its fence in the page."""

    page: Path
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(language: str) -> list[Block]:
    """Every block of a language, in the order of pages and lines."""
    found = []
    for page in PAGES:
        text = page.read_text()
        for match in re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
            if match[1] == language:
                found.append(Block(page, text.count("\n", 0, match.start()) + 1, language, match[2]))
    return found


def rows(page: str) -> list[list[str]]:
    """The rows of all tables of a page of ``docs/``, heads included, cells as they are written."""
    text = (ROOT / "docs" / page).read_text()
    lines = [line.strip() for line in text.splitlines() if line.startswith("|") and not line.startswith("|---")]
    return [[cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


def links(page: Path) -> list[str]:
    """Where a page's links lead to, outside of blocks and code."""
    text = re.sub(r"^```.*?^```$|`[^`\n]*`", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    return re.findall(r"\]\(([^)\s]+)\)", text)


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives a page's headings."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
