"""The READMEs and the pages of docs/, taken apart: sections, code, figures, links."""

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
BLOCK = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
CODE = re.compile(r"`([^`\n]+)`")
CHINESE = tuple(sorted(page.relative_to(ROOT).as_posix() for page in (ROOT / "docs").glob("*.zh.md")))
"""The pages that are in Chinese too: whoever adds one has it checked."""


@dataclass(frozen=True)
class Section:
    """A heading and what stands below it, up to the next one of any level."""

    level: int
    title: str
    text: str

    @property
    def anchor(self):
        """What a link to it ends in, as GitHub makes it."""
        return re.sub(r"[^\w\- ]", "", self.title.lower()).replace(" ", "-")

    @property
    def prose(self):
        return BLOCK.sub("", self.text)

    @property
    def code(self):
        """What is set between backticks within a line."""
        return set(re.findall(CODE, self.prose))

    @property
    def blocks(self):
        """Its blocks of code: each line without its comment, and whether it has one."""
        return [[(line, bool(comment)) for line, comment in map(parted, block.splitlines())]
                for block in BLOCK.findall(self.text)]  # fmt: skip

    @property
    def comments(self):
        return [
            comment for block in BLOCK.findall(self.text) for _, comment in map(parted, block.splitlines()) if comment
        ]

    @property
    def figures(self):
        return figures_of(f"{self.title}\n{self.text}")

    @property
    def rows(self):
        """Its tables: how many bars and which code each row has; a `|` within backticks is no bar."""
        lines = [line for line in self.prose.splitlines() if line.startswith("|")]
        return [(re.sub(CODE, "", line).count("|"), set(re.findall(CODE, line))) for line in lines]

    @property
    def links(self):
        """Where its links lead: a file, empty for this one, and an anchor, empty for none."""
        found = re.findall(r"\]\(([^)#]*)(?:#([^)]*))?\)", self.prose)
        return [(file, anchor) for file, anchor in found if "://" not in file]


def text_of(name):
    return (ROOT / name).read_text(encoding="utf-8")


def english_of(name):
    return name.replace(".zh.md", ".md")


def parted(line):
    """A line of code, and its comment."""
    code, *comment = re.split(r"(?:^|\s+)#\s+", line, maxsplit=1)
    return code, "".join(comment)


def figures_of(text):
    """Every number that stands by itself, how often; not those within names, versions and ids."""
    return Counter(re.findall(r"(?<![A-Za-z0-9_.-])\d+(?:\.\d+)*", text))


def sections(name):
    """The sections of a page in order; what is left of the first heading is none."""
    text = text_of(name)
    hidden = BLOCK.sub(lambda block: re.sub(r"[^\n]", " ", block[0]), text)
    found = list(re.finditer(r"^(#+) (.+)$", hidden, re.MULTILINE))
    ends = [*(each.start() for each in found[1:]), len(text)]
    return [
        Section(len(each[1]), each[2].strip(), text[each.end() : end]) for each, end in zip(found, ends, strict=True)
    ]


def led_to(name, link):
    """The page that a link on page `name` leads to, by its English name, and the place of the section there: None
    where the link names none, or that page is not there."""
    file, anchor = link
    page = ((ROOT / name).parent / file).resolve() if file else ROOT.resolve() / name
    target = page.relative_to(ROOT.resolve()).as_posix()
    if not anchor or not page.exists():
        return english_of(target), None
    anchors = [section.anchor for section in sections(target)]
    assert anchor in anchors, f"{target} has no section #{anchor}"
    return english_of(target), anchors.index(anchor)
