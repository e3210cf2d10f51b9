"""What the READMEs and the pages of docs/ tell a user to type is there, and both languages say the same."""

import ast
import json
import re
import shlex

import pytest
from pydantic_core import PydanticUndefined

import fabfile
from inventory.settings import load_settings
from tests.support.pages import CHINESE, ROOT, english_of, figures_of, led_to, sections, text_of
from training.laptop.plan_options import PlanWish, plan_question
from training.models.names import load_recipe, recipe_names
from training.plan.options import choose
from training.recipe.recipe import NOT_COMPUTED, Recipe
from training.recipe.tables import Table

READMES = ("README.md", "README.zh.md")
MESSAGES = ("docs/troubleshooting.md", "docs/own-machines.md", "docs/aliyun-errors.md")
"""Pages with tables of messages."""
PAGES = (
    "docs/aliyun-errors.md",
    "docs/aliyun.md",
    "docs/another-cloud.md",
    "docs/choosing.md",
    "docs/commands.md",
    "docs/data.md",
    "docs/development.md",
    "docs/dpo.md",
    "docs/local-cloud-api.md",
    "docs/map.md",
    "docs/models.md",
    "docs/own-machines.md",
    "docs/prove.md",
    "docs/recipe.md",
    "docs/renting.md",
    "docs/slow-networks.md",
    "docs/snapshots.md",
    "docs/strategies.md",
    "docs/training.md",
    "docs/troubleshooting.md",
    *CHINESE,
)
RECORDS = (
    "CHANGELOG.md",
    "docs/decisions.md",
    "docs/log.md",
    *sorted(f"docs/decisions/{page.name}" for page in (ROOT / "docs/decisions").glob("*.md")),
)
PROGRAMS = ("fab", "make", "pyinfra", "pytest")
FOLDERS = ("inventory", "deploy", "training", "snapshots")


def snippets(text):
    """Everything set as code: the lines of blocks without their comments, and what stands between backticks."""
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        if language in {"", "sh"}:
            yield from (re.split(r"\s#\s", line)[0].strip() for line in block.splitlines())
    yield from re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE))


def commands(name):
    """Every command of ours in a README or a page, as its words."""
    lines = {line for line in snippets(text_of(name)) if line.split(maxsplit=1)[:1] and line.split()[0] in PROGRAMS}
    return sorted(shlex.split(line.replace("[", "").replace("]", "")) for line in lines)


def of_program(program):
    return [pytest.param(words, id=f"{n}: {' '.join(words)}") for n in (*READMES, *PAGES) for words in commands(n)
            if words[0] == program and len(words) > 1]  # fmt: skip


def flags_of(task):
    arguments = fabfile.namespace[task].get_arguments()
    switched_off = {f"--no-{name}" for argument in arguments if argument.default is True for name in argument.names}
    return switched_off | {f"--{name}" for argument in arguments for name in argument.names}


@pytest.mark.parametrize("words", of_program("fab"))
def test_a_fab_command_is_a_task_with_these_flags(words):
    if words[1].startswith("--list"):
        return
    if words[1] == "--help":
        words = ["fab", *words[2:]]
    names = fabfile.namespace.task_names
    assert words[1] in {*names, *(other for others in names.values() for other in others)}
    own = words[: words.index("--")] if "--" in words else words
    given = {word.split("=")[0] for word in own[2:] if word.startswith("--")}
    assert given - flags_of(words[1]) == set()


@pytest.mark.parametrize("name", [*READMES, *PAGES])
def test_a_flag_that_is_named_by_itself_is_one_of_ours(name):
    flags = {flag for task in fabfile.namespace.task_names for flag in flags_of(task)}
    named = {word.split("=")[0] for code in snippets(text_of(name)) if code.startswith("--") for word in code.split()}
    assert {word for word in named if word.startswith("--")} - flags == set()


def recipe_keys(table=Recipe, prefix=""):
    for key, field in table.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Table):
            yield from recipe_keys(field.annotation, f"{key}.")
        else:
            yield prefix + key, field.get_default(call_default_factory=True)


def shown(default):
    """A default as the table has it."""
    if default is PydanticUndefined:
        return "-"
    if isinstance(default, bool):
        return str(default).lower()
    if isinstance(default, tuple | dict):
        return ", ".join(map(str, default)) or "none"
    return f"{default:g}" if isinstance(default, float) else str("none" if default in (None, "") else default)


@pytest.mark.parametrize("name", [page for page in PAGES if english_of(page) == "docs/recipe.md"])
def test_the_table_of_keys_has_every_key_with_its_default_and_says_which_a_resumed_run_may_change(name):
    rows = re.findall(r"^\| `([a-z_.]+)`( \*)? \| ([^|]+) \|", text_of(name), re.MULTILINE)
    in_english = {"无": "none"}
    assert {key: (in_english.get(default, default), bool(star)) for key, star, default in rows} == {
        key: (shown(default), key in NOT_COMPUTED) for key, default in recipe_keys()
    }


@pytest.mark.parametrize("words", of_program("fab"))
def test_a_model_that_is_named_has_a_recipe(words):
    if "--model" in words and (model := words[words.index("--model") + 1]) != "NAME":
        assert model in recipe_names() or model.startswith("./")


@pytest.mark.parametrize("words", of_program("make"))
def test_a_make_command_is_a_target(words):
    targets = re.findall(r"^([a-z-]+):", text_of("Makefile"), re.MULTILINE)
    assert set(words[1:]) <= set(targets)


@pytest.mark.parametrize("words", [*of_program("pyinfra"), *of_program("pytest")])
def test_files_that_commands_name_are_there(words):
    files = [word for word in words[1:] if not word.startswith("-") and word != "INVENTORY"]
    assert [file for file in files if not (ROOT / file).exists()] == []


@pytest.mark.parametrize("name", [*READMES, *PAGES, *RECORDS])
def test_relative_links_lead_somewhere(name):
    links = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text_of(name))
    local = [link for link in links if "://" not in link]
    assert [link for link in local if not ((ROOT / name).parent / link).exists()] == []


def table_commands(name):
    """The first column of the table of commands; a task named without `fab` follows one with it."""
    return [re.findall(r"`([^`]+)`", row) for row in re.findall(r"^\| (`[^|]+) \|", text_of(name), re.MULTILINE)]


def test_both_languages_have_the_same_table_of_commands():
    english, chinese = (table_commands(name) for name in READMES)
    assert english == chinese
    assert len(english) > 5


@pytest.mark.parametrize("name", READMES)
def test_tasks_named_short_in_the_table_exist(name):
    named = [word.split()[0] for row in table_commands(name) if row[0].startswith("fab ") for word in row[1:]]
    assert [task for task in named if task not in fabfile.namespace.task_names] == []


def test_both_languages_say_the_same_commands():
    english, chinese = ({tuple(words) for words in commands(name)} for name in READMES)
    assert chinese - english == set()


def test_the_commands_are_found_at_all():
    assert ["fab", "train", "--model", "qwen2.5-14b", "--data", "conversations.jsonl"] in commands("README.md")
    assert ["pyinfra", "inventory/static.py", "deploy/base.py"] in commands("README.zh.md")


def test_the_policy_in_the_docs_allows_every_action_that_is_called_and_no_other():
    calls = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "inventory/aliyun_ecs").glob("*.py"))
    called = set(re.findall(r'(?:\bcall|pages|\bowned|\bremove)\(\s*"([A-Z]\w+)"', calls))
    (policy,) = map(json.loads, re.findall(r"```json\n(.*?)```", text_of("docs/aliyun.md"), re.DOTALL))
    assert {word.split(":")[1] for word in policy["Statement"][0]["Action"]} == called


def test_the_example_of_cluster_toml_in_the_docs_can_be_read(tmp_path):
    example = re.search(r"```toml\n(.*?)```", text_of("docs/aliyun.md"), re.DOTALL)[1]
    (tmp_path / "cluster.toml").write_text(example, encoding="utf-8")
    assert load_settings(tmp_path / "cluster.toml").aliyun.nodes == 4


def test_the_machine_of_the_example_in_the_readmes_holds_the_model_that_it_names(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for name in READMES:
        (example,) = re.findall(r"```toml\n(.*?)```", text_of(name), re.DOTALL)
        (tmp_path / "cluster.toml").write_text(example, encoding="utf-8")
        settings = load_settings(tmp_path / "cluster.toml")
        (model,) = settings.models.names
        assert ["fab", "train", "--model", model, "--data", "conversations.jsonl"] in commands(name)
        question = plan_question(settings, load_recipe(model), PlanWish())
        assert choose(question.shape, question.recipe, question.machines, None, question.wish.free).chosen


def test_both_languages_have_the_same_figures():
    english, chinese = (figures_of(text_of(name)) for name in READMES)
    assert english == chinese
    assert english["9.53"] == 1, "a machine's price: figures are found at all"


def test_chinese_pages_are_found_at_all():
    assert {"docs/data.zh.md", "docs/troubleshooting.zh.md"} <= set(CHINESE)


@pytest.mark.parametrize("name", CHINESE)
def test_a_chinese_page_has_the_sections_of_the_english_one(name):
    english, chinese = sections(english_of(name)), sections(name)
    assert [section.level for section in chinese] == [section.level for section in english]


@pytest.mark.parametrize("taken", ["code", "blocks", "figures", "rows"])
@pytest.mark.parametrize("name", CHINESE)
def test_a_section_in_chinese_has_what_the_english_one_has(name, taken):
    english = [(section.title, getattr(section, taken)) for section in sections(english_of(name))]
    chinese = [getattr(section, taken) for section in sections(name)]
    assert [(title, found) for (title, _), found in zip(english, chinese, strict=True)] == english


@pytest.mark.parametrize("name", CHINESE)
def test_comments_of_code_on_a_chinese_page_are_in_chinese(name):
    comments = [comment for section in sections(name) for comment in section.comments]
    assert [comment for comment in comments if not re.search(r"[\u4e00-\u9fff]", comment)] == []


def other_language(name):
    """The first link of a page, below its title."""
    return sections(name)[0].links[0][0]


@pytest.mark.parametrize("name", CHINESE)
def test_a_page_in_two_languages_begins_with_a_link_to_the_other(name):
    file = name.removeprefix("docs/")
    assert (other_language(name), other_language(english_of(name))) == (english_of(file), file)


@pytest.mark.parametrize("name", CHINESE)
def test_links_of_a_chinese_page_lead_where_the_english_ones_do(name):
    english, chinese = (
        [{led_to(page, link) for link in section.links} for section in sections(page)]
        for page in (english_of(name), name)
    )
    assert chinese == english


@pytest.mark.parametrize("name", [*CHINESE, "README.zh.md"])
def test_a_chinese_page_leads_on_in_chinese_where_it_can(name):
    links = [file for section in sections(name) for file, _ in section.links if file.endswith(".md")]
    english = [file for file in links if (ROOT / name).parent.joinpath(file[:-3] + ".zh.md").exists()]
    assert english == [english_of(name.removeprefix("docs/"))], "only the link to the same page in English"


@pytest.mark.parametrize("name", [*READMES, *PAGES])
def test_a_link_to_a_section_finds_it(name):
    for section in sections(name):
        for link in section.links:
            led_to(name, link)


def quoted(name="docs/troubleshooting.md"):
    """The messages that a page quotes, in the first columns of its tables."""
    cells = re.findall(r"^\| ([^|]+) \|", text_of(name), re.MULTILINE)
    codes = {code for cell in cells for code in re.findall(r"`([^`]+)`", cell)}
    return sorted(code for code in codes if len(code.split()) > 3 and code.split()[0] not in PROGRAMS)


@pytest.fixture(scope="module")
def our_words():
    """All text in our code, a line a piece."""
    trees = [ast.parse(path.read_text()) for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    texts = (node.value for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Constant))
    return "\n".join(text for text in texts if isinstance(text, str))


@pytest.mark.parametrize("sentence", sorted({each for name in MESSAGES for each in quoted(name)}))
def test_a_message_that_a_page_quotes_is_one_of_ours(sentence, our_words):
    words = sentence.split()
    runs = (" ".join(words[a:b]) for a in range(len(words)) for b in range(a + 2, len(words) + 1))
    assert any(run in our_words for run in runs if len(run) > 10), "no two words of it stand in the code"


def test_sentences_are_quoted_at_all():
    assert len(quoted()) > 15
    for name in MESSAGES:
        assert quoted(name.replace(".md", ".zh.md")) == quoted(name)


def test_every_exit_code_is_found_by_the_words_exit_code_in_chinese():
    english, chinese = (sections(f"docs/commands{language}.md")[-1] for language in ("", ".zh"))
    codes = re.findall(r"(?:^|\s)(\d+): ", english.text)
    assert sorted(re.findall(r"退出码 (\d+)：", chinese.text)) == sorted(codes)
    assert len(codes) == 5


def test_the_rows_of_a_plan_are_found_by_the_names_that_it_prints_in_chinese_too():
    english, chinese = (sections(f"docs/troubleshooting{language}.md")[1] for language in ("", ".zh"))
    rows = re.findall(r"^\| ([^|]+) \| ", english.prose.split("|---|---|")[1], re.MULTILINE)
    printed = {name for row in rows for name in row.split(", ")}
    assert {name for name in printed if not re.search(rf"^\| (?:.*、)?{name}\b", chinese.prose, re.MULTILINE)} == set()
    assert {"GPU memory", "truncated"} <= printed
