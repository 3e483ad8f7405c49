"""Links lead somewhere: those of docs/ on the site, which `make site` builds strictly, the others in the repository.

The site has the pages of docs/ alone. A file beside them is named in backticks, or linked with its whole address.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
CODE = re.compile(r"^ *(`{3,}|~{3,}).*?^ *\1|`[^`\n]+`", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[(?:[^\[\]]|\[[^\]]*\])*\]\(<?([^)\s>]+)")
HEADING = re.compile(r"^#{1,6} +(.+?) *#*$", re.MULTILINE)


@cache
def anchors(page: Path, *, site: bool) -> frozenset[str]:
    """Return the names of a page's headings, as Python-Markdown (the site) or as a forge makes them."""
    text = re.sub(r"^ *(`{3,}|~{3,}).*?^ *\1", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    found: Counter[str] = Counter()
    names = set()
    for heading in HEADING.findall(text):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
        if site:
            plain = unicodedata.normalize("NFKD", plain).encode("ascii", "ignore").decode("ascii")
        name = re.sub(r"[^\w\s-]", "", plain.replace("*", "")).strip().lower()
        name = re.sub(r"[-\s]+", "-", name) if site else name.replace(" ", "-")
        again = found[name]
        found[name] += 1
        names.add(f"{name}{'_' if site else '-'}{again}" if again else name)
    return frozenset(names)


def wrong_links(page: Path, root: Path) -> Iterator[str]:
    """Yield what is wrong with the links of a page, for each of them that leads nowhere."""
    site = root / "docs"
    on_site = page.is_relative_to(site)
    for target in LINK.findall(CODE.sub("", page.read_text("utf-8"))):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        reason = ""
        if name.startswith("/"):
            reason = "is absolute"
        elif on_site and not (path.is_relative_to(site) and path.suffix):
            reason = "leads out of the site: name the file in backticks"
        elif on_site and path.parent == site / "reference":
            if f"reference/{path.name}" not in (root / "mkdocs.yml").read_text("utf-8"):
                reason = "leads to a page of reference that mkdocs.yml does not list"
        elif not path.exists():
            reason = "leads to a file that does not exist"
        elif anchor and path.suffix == ".md" and anchor not in anchors(path, site=on_site):
            reason = f"leads to a heading that {path.name} does not have"
        if reason:
            yield f"{page.relative_to(root)}: {target} {reason}"


def test_every_link_leads_somewhere() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / ".github").rglob("*.md")]
    pages += [page for folder in ("docs", "examples", "benchmarks") for page in (ROOT / folder).rglob("*.md")]
    pages = [page for page in pages if page.parent != ROOT / "docs" / "reference"]
    assert len(pages) > 80
    wrong = [line for page in sorted(pages) for line in wrong_links(page, ROOT)]
    assert not wrong, "`make site` builds docs/ alone, and refuses links that lead nowhere"


def test_it_finds_what_leads_nowhere(tmp_path: Path) -> None:
    docs = tmp_path / "docs"
    docs.mkdir()
    (tmp_path / "mkdocs.yml").write_text("nav:\n  - reference/api.md\n")
    (tmp_path / "README.md").write_text("# A/b - c\n[right](docs/b.md#two--one), [wrong](docs/b.md#two-one), [w](x.py)")
    (docs / "b.md").write_text("# Two / `one`\n## Same\n## Same\n```sh\n# Not a heading\n```\n")
    right = "b.md#two-one", "b.md#same_1", "#a", "reference/api.md", "https://a.b/c", "mailto:a@b.c"
    code = "```\n[a](nowhere.md)\n```\n`[a](nowhere.md)`\n"
    (docs / "a.md").write_text(f"# A\n{code}" + "\n".join(f"[x `y` [z]]({target})" for target in right))
    assert not list(wrong_links(docs / "a.md", tmp_path))
    assert [line.split()[1] for line in wrong_links(tmp_path / "README.md", tmp_path)] == ["docs/b.md#two-one", "x.py"]
    wrong = (
        "../README.md",
        "c.md",
        "/docs/b.md",
        "#not-a-heading",
        "b.md#not-a-heading",
        "b.md#same_2",
        "reference/b.md",
        ".",
    )
    (docs / "a.md").write_text("# A\n" + "\n".join(f"![x]({target})" for target in wrong))
    assert [line.split()[1] for line in wrong_links(docs / "a.md", tmp_path)] == list(wrong)
